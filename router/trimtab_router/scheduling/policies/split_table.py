"""What it costs to answer so many rows, and how right that is, by every way the plan allows. Pure.

A book is made of what was profiled, and lasts as long as the plan. What was learnt since about how fast each point runs
here scales its pages when they are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import inf

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.row_splits import (
    UNIT,
    Batches,
    Floats,
    Integers,
    ParetoFront,
    SplitOption,
    cheapest_batches,
    never_slower,
    pareto_fronts,
)
from trimtab_pipelines.row_splits import undominated as unbeaten_ways
from trimtab_pipelines.spec import MOST_ROWS
from trimtab_router.scheduling.policies.interface import Escalation, Point

ENCODER_DEDUP = 8
"""Of a batch of second looks, at least, where several jobs wait for theirs."""
NONE = -1
HARDLY = 0.0025
"""Accuracy that a held-out set of thousands does not tell apart: nobody waits for it."""
Truths = NDArray[np.bool_]
_FIRST_PAGES = 8


@dataclass(frozen=True, slots=True)
class ServingOption:
    """One way to answer rows: at the point of that place; `look`: and its least certain ones at another as well."""

    way: SplitOption
    point: int
    look: Escalation | None = None
    then: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SplitSet:
    """Splits of so many rows, from the fastest on: no other beats them, as far as point for point the profile holds.

    Attributes:
        accuracy: expected of a row on average, ascending. Shape (splits,).
        parts: seconds at each point, as profiled. Shape (splits, points).
        rows: how many rows each line gets. Shape (splits, lines).
        sole: the point that all rows go to, alone and once; NONE where there are several. Shape (splits,).
        passing: the point that all rows go to first, where their one way looks twice; else NONE. Shape (splits,).
        twice: whether any of the rows may be looked at again. Shape (splits,).
    """

    accuracy: Floats
    parts: Floats
    rows: Integers
    sole: Integers
    passing: Integers
    twice: Truths

    def seconds(self, ratios: Floats) -> Floats:
        """Seconds of each split. Shape (splits,).

        Args:
            ratios: of what each point takes now to what was profiled. Shape (points,).
        """
        found: Floats = self.parts @ ratios
        return found

    def only(self, places: Integers) -> "SplitSet":
        """Some of its splits."""
        return SplitSet(*(getattr(self, each.name)[places] for each in fields(self)))


class SplitTable:
    """All pages of one set of points; they are written when they are first asked for, and then never change."""

    def __init__(self, costs: Sequence["PointCost"]) -> None:
        self.costs = costs
        self.batches = [cheapest_batches(cost.seconds, MOST_ROWS) for cost in costs]
        self.firsts = np.array([batches.seconds for batches in self.batches] + [(inf,) * (MOST_ROWS + 1)]).T
        """Seconds of so many rows at each point, once; behind them what NONE takes. Shape (rows, points + 1)."""
        lines = {line.way.name: line for line in self._every_line()}
        kept = [way.name for way in undominated_options([line.way for line in lines.values()])]
        again = {look.to for cost in costs for look in cost.looks}.intersection(lines).difference(kept)
        self.lines = [lines[name] for name in (*kept, *sorted(again))]
        self._again_only = len(again)
        """Lines at the end that nobody goes at first: who is looked at again has nothing else."""
        self._looks_twice = np.array([line.look is not None for line in self.lines])
        self._first_points = np.array([line.point for line in self.lines])
        self._mixed: list[SplitSet] = []
        self.awaited = False
        """Somebody writes the splits of every size meanwhile, so that no decision should."""
        self._plain: dict[int, SplitSet] = {}

    @property
    def written(self) -> int:
        """How many rows a job may have that its splits are written for."""
        return len(self._mixed) - 1

    def has_mixed(self, rows: int) -> bool:
        """Whether a decision may ask for the splits of so many rows: they are written, or nobody else writes them."""
        return not self.awaited or rows <= self.written

    def mixed(self, rows: int) -> SplitSet:
        """The splits of so many rows of one job."""
        pages = self._mixed
        if len(pages) <= rows:
            most = min(max(2 * len(pages), _FIRST_PAGES, rows), MOST_ROWS)
            ways = [line.way for line in self.lines[: len(self.lines) - self._again_only]]
            pages = [self._page(front) for front in pareto_fronts(ways, most)]
            if len(pages) > len(self._mixed):  # another thread may have written more meanwhile
                self._mixed = pages
        return pages[rows]

    def plain(self, rows: int) -> SplitSet:
        """The ways that all of so many rows may go together, each a batch or several, from the fastest on."""
        page = self._plain.get(rows)
        if page is None:
            every = np.eye(len(self.lines), dtype=np.int64) * rows
            accuracy = np.array([line.way.accuracy for line in self.lines])
            front = ParetoFront(accuracy, np.array([line.way.seconds[rows] for line in self.lines]), every)
            page = self._plain[rows] = self._page(front).only(np.lexsort((-accuracy, front.seconds)))
        return page

    def _page(self, front: ParetoFront) -> SplitSet:
        parts = np.zeros((front.seconds.size, len(self.costs)))
        rows = np.pad(front.rows, ((0, 0), (0, len(self.lines) - front.rows.shape[1])))
        for place, line in enumerate(self.lines):
            given = rows[:, place]
            parts[:, line.point] += np.array(self.batches[line.point].seconds)[given]
            if line.look is not None and line.then is not None:
                parts[:, line.then] += escalation_seconds(self.batches[line.then], line.look, given)
        used = rows > 0
        twice: Truths = np.any(used[:, self._looks_twice], axis=1)
        only = np.where(used.sum(axis=1) == 1, self._first_points[used.argmax(axis=1)], NONE)
        return SplitSet(front.accuracy, parts, rows, np.where(twice, NONE, only), np.where(twice, only, NONE), twice)

    def _every_line(self) -> list[ServingOption]:
        places = {cost.name: place for place, cost in enumerate(self.costs)}
        lines = [
            ServingOption(SplitOption(cost.name, cost.accuracy, batches.seconds), place)
            for place, (cost, batches) in enumerate(zip(self.costs, self.batches, strict=True))
        ]
        for place, cost in enumerate(self.costs):
            lines += [self._twice(place, look, places[look.to]) for look in cost.looks if look.to in places]
        return lines

    def _twice(self, place: int, look: Escalation, then: int) -> ServingOption:
        name = f"{self.costs[place].name}>{look.to}@{look.share:.3f}"
        first = np.array(self.batches[place].seconds)
        seconds = first + escalation_seconds(self.batches[then], look, np.arange(first.size))
        return ServingOption(SplitOption(name, look.accuracy, tuple(seconds.tolist())), place, look, then)


@dataclass(frozen=True, slots=True)
class PointCost:
    """A point as a book knows it: `seconds` of batches of 1, 2, … rows as profiled."""

    name: str
    accuracy: float
    seconds: tuple[float, ...]
    looks: tuple[Escalation, ...]


def undominated_options(ways: Sequence[SplitOption]) -> list[SplitOption]:
    """The ways that no other beats, but those that take longer than another for hardly more accuracy."""
    kept = unbeaten_ways(ways)
    accuracy = np.array([way.accuracy for way in kept])
    hardly_less = (accuracy[:, None] < accuracy) & (accuracy[:, None] >= accuracy - HARDLY)
    outdone = np.any(hardly_less & never_slower(kept), axis=0)
    return [way for way, out in zip(kept, outdone, strict=True) if not out]


def escalation_seconds(batches: Batches, look: Escalation, rows: Integers) -> Floats:
    """Expected seconds of the second look at each of so many rows, in batches that other jobs' doubted rows fill up.

    Two or three doubted rows of a job hardly ever go alone. Charged a batch of their own they seem to cost twice what
    they do, and dearer ways seem to cost no more.
    """
    alone = np.array(batches.seconds)
    counts = np.arange(alone.size)
    size = min(ENCODER_DEDUP, alone.size - 1)
    expected: Floats = np.interp(look.share * rows, counts, np.minimum(alone, counts * (alone[size] / size)))
    return expected


def escalated_rows(look: Escalation, rows: Integers) -> Integers:
    """How many of so many rows are looked at again, as planned."""
    again: Integers = np.ceil(look.share * rows - 1e-9).astype(np.int64)
    return again


def split_table(points: Sequence[Point], task: str, most_rows: int) -> SplitTable:
    """The book of these points for a task; the same one as long as nothing of it changes."""
    return _book(tuple(_costs(point, task, most_rows) for point in points))


@lru_cache(maxsize=64)
def _book(costs: tuple[PointCost, ...]) -> SplitTable:
    return SplitTable(costs)


def _costs(point: Point, task: str, most_rows: int) -> PointCost:
    accuracy = round(point.accuracy_for(task) / UNIT) * UNIT
    return PointCost(point.name, accuracy, profiled(point, most_rows), _looks(point, task))


def _looks(point: Point, task: str) -> tuple[Escalation, ...]:
    """What was measured of looking again at rows of a task: of all tasks mixed, nothing is known of a single one."""
    if not task:
        return tuple(look for look in point.looks if not look.by_task)
    own = ((look, look.by_task[task]) for look in point.looks if task in look.by_task)
    return tuple(replace(look, share=of.share, accuracy=of.accuracy) for look, of in own if 0 < of.share < 1)


def profiled(point: Point, most_rows: int) -> tuple[float, ...]:
    """Seconds of batches of 1, 2, … rows: the profile's, else what is predicted now."""
    return point.profiled[:most_rows] or tuple(point.seconds(rows) for rows in range(1, most_rows + 1))


__all__ = [
    "MOST_ROWS",
    "NONE",
    "Batches",
    "PointCost",
    "ServingOption",
    "SplitSet",
    "SplitTable",
    "escalated_rows",
    "escalation_seconds",
    "profiled",
    "split_table",
]
