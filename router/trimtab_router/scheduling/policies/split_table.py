"""`SplitTable`: cost and accuracy of serving a job by each allowed split of its rows over operating points.

A table is built from profiled seconds and lasts as long as the plan. The slowdown of each point that was observed since
scales its entries when they are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import inf

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.escalation_pruning import NEGLIGIBLE_ACCURACY
from trimtab_pipelines.row_splits import (
    UNIT,
    BatchSplit,
    Floats,
    Integers,
    ParetoFront,
    SplitOption,
    cheapest_batches,
    never_slower,
    pareto_fronts,
    undominated,
)
from trimtab_pipelines.scheduling_policies import MAX_SPLIT_ROWS
from trimtab_router.scheduling.policies.interface import Escalation, Point
from trimtab_router.scheduling.service_time import Key


@dataclass(frozen=True, slots=True)
class ServingOption:
    """A way to serve rows: all at `point`; with an escalation, its low-confidence rows again at `escalation.to`."""

    point: Key
    accuracy: float
    """Expected over all rows, after the escalation."""
    point_index: int
    escalation: Escalation | None = None
    escalation_index: int = -1
    """Index of the point that serves escalated rows; -1 without an escalation."""


@dataclass(frozen=True, slots=True)
class PointCost:
    """A point's seconds for batches of 1, 2, … rows, and its accuracy and escalations for a task."""

    name: str
    accuracy: float
    seconds: tuple[float, ...]
    escalations: tuple[Escalation, ...]
    variant: str

    @property
    def key(self) -> Key:
        return self.variant, self.name


def serving_options(points: Sequence[Point | PointCost]) -> list[ServingOption]:
    indices = {point.key: index for index, point in enumerate(points)}
    options = [ServingOption(point.key, point.accuracy, index) for index, point in enumerate(points)]
    return options + [
        ServingOption(point.key, escalation.accuracy, index, escalation, indices[escalation.target])
        for index, point in enumerate(points)
        for escalation in point.escalations
        if escalation.target in indices
    ]


def profiled(point: Point, max_rows: int) -> tuple[float, ...]:
    """Return the seconds of batches of 1, 2, … rows: profiled, else predicted."""
    return point.profiled[:max_rows] or tuple(point.seconds(rows) for rows in range(1, max_rows + 1))


ESCALATION_FILL_ROWS = 8  # assumed rows of an escalation batch, which rows of several jobs fill
NONE = -1
Booleans = NDArray[np.bool_]
_FIRST_MIXED_ROWS = 8


@dataclass(frozen=True, slots=True, eq=False)
class SplitSet:
    """Splits of a number of rows that no other beats while all points slow down alike, the fastest first."""

    accuracy: Floats
    """Expected mean over the rows, ascending. Shape (splits,)."""
    point_seconds: Floats
    """Profiled seconds at each point. Shape (splits, points)."""
    rows: Integers
    """Rows of each serving option. Shape (splits, options)."""
    sole_point: Integers
    """Point of all rows if they run at one point without escalation; else NONE. Shape (splits,)."""
    first_pass_point: Integers
    """Of all rows if they share one escalating option; else NONE. Shape (splits,)."""
    escalates: Booleans
    """Whether any row may be escalated. Shape (splits,)."""

    def seconds(self, ratios: Floats) -> Floats:
        """Return the seconds of each split; `ratios` (points,) are current over profiled seconds. Shape (splits,)."""
        result: Floats = self.point_seconds @ ratios
        return result

    def select(self, indices: Integers) -> "SplitSet":
        return SplitSet(*(getattr(self, each.name)[indices] for each in fields(self)))


class SplitTable:
    """All splits of one set of points. Entries are built on first use and then never change."""

    def __init__(self, costs: Sequence[PointCost]) -> None:
        self.costs = costs
        self.batches = [cheapest_batches(cost.seconds, MAX_SPLIT_ROWS) for cost in costs]
        self.first_pass_seconds = np.array(
            [batches.seconds for batches in self.batches] + [(inf,) * (MAX_SPLIT_ROWS + 1)]
        ).T
        """Seconds of each number of rows at each point, without escalation; the last column is infinite, for NONE.
        Shape (rows, points + 1)."""
        options = [(option, self._split_option(option)) for option in serving_options(costs)]
        self.options, self.split_options, self._mixed_options = _select_options(options)
        self._escalating = np.array([option.escalation is not None for option in self.options])
        self._first_points = np.array([option.point_index for option in self.options])
        self._mixed: list[SplitSet] = []
        self.building = False  # whether another thread builds the splits of all sizes, so that no decision should
        self._plain: dict[int, SplitSet] = {}

    @property
    def max_mixed_rows(self) -> int:
        return len(self._mixed) - 1

    def has_mixed(self, rows: int) -> bool:
        """Return whether a decision may ask for these splits: they are built, or no other thread builds them."""
        return not self.building or rows <= self.max_mixed_rows

    def mixed(self, rows: int) -> SplitSet:
        split_sets = self._mixed
        if len(split_sets) <= rows:
            max_rows = min(max(2 * len(split_sets), _FIRST_MIXED_ROWS, rows), MAX_SPLIT_ROWS)
            fronts = pareto_fronts(self.split_options[: self._mixed_options], max_rows)
            split_sets = [self._split_set(front) for front in fronts]
            if len(split_sets) > len(self._mixed):  # another thread may have built more meanwhile
                self._mixed = split_sets
        return split_sets[rows]

    def plain(self, rows: int) -> SplitSet:
        split_set = self._plain.get(rows)
        if split_set is None:
            every = np.eye(len(self.options), dtype=np.int64) * rows
            accuracy = np.array([option.accuracy for option in self.split_options])
            seconds = np.array([option.seconds[rows] for option in self.split_options])
            front = ParetoFront(accuracy, seconds, every)
            split_set = self._plain[rows] = self._split_set(front).select(np.lexsort((-accuracy, front.seconds)))
        return split_set

    def _split_set(self, front: ParetoFront) -> SplitSet:
        point_seconds = np.zeros((front.seconds.size, len(self.costs)))
        rows = np.pad(front.rows, ((0, 0), (0, len(self.options) - front.rows.shape[1])))
        for index, option in enumerate(self.options):
            given = rows[:, index]
            point_seconds[:, option.point_index] += np.array(self.batches[option.point_index].seconds)[given]
            if option.escalation is not None:
                point_seconds[:, option.escalation_index] += escalation_seconds(
                    self.batches[option.escalation_index], option.escalation, given
                )
        used = rows > 0
        escalates: Booleans = np.any(used[:, self._escalating], axis=1)
        sole_point = np.where(used.sum(axis=1) == 1, self._first_points[used.argmax(axis=1)], NONE)
        return SplitSet(
            front.accuracy,
            point_seconds,
            rows,
            np.where(escalates, NONE, sole_point),
            np.where(escalates, sole_point, NONE),
            escalates,
        )

    def _split_option(self, option: ServingOption) -> SplitOption:
        seconds, escalation = self.batches[option.point_index].seconds, option.escalation
        if escalation is None:
            return SplitOption("/".join(option.point), option.accuracy, seconds)
        again = escalation_seconds(self.batches[option.escalation_index], escalation, np.arange(len(seconds)))
        name = f"{'/'.join(option.point)}>{'/'.join(escalation.target)}@{escalation.share:.3f}"
        return SplitOption(name, option.accuracy, tuple((np.array(seconds) + again).tolist()))


def _select_options(
    options: Sequence[tuple[ServingOption, SplitOption]],
) -> tuple[list[ServingOption], list[SplitOption], int]:
    """Return the options worth their seconds, those of escalated rows last, and the number of the others."""
    by_name = {split_option.name: (option, split_option) for option, split_option in options}
    names = [option.name for option in undominated_options([split_option for _, split_option in by_name.values()])]
    targets = {"/".join(option.escalation.target) for option, _ in options if option.escalation is not None}
    selected = [by_name[name] for name in (*names, *sorted(targets.difference(names)))]
    return [option for option, _ in selected], [split_option for _, split_option in selected], len(names)


def undominated_options(options: Sequence[SplitOption]) -> list[SplitOption]:
    candidates = undominated(options)
    accuracy = np.array([option.accuracy for option in candidates])
    negligibly_less = (accuracy[:, None] < accuracy) & (accuracy[:, None] >= accuracy - NEGLIGIBLE_ACCURACY)
    outdone = np.any(negligibly_less & never_slower(candidates), axis=0)
    return [option for option, out in zip(candidates, outdone, strict=True) if not out]


def escalation_seconds(batches: BatchSplit, escalation: Escalation, rows: Integers) -> Floats:
    """Return the expected seconds of escalating some rows, in batches that rows of other jobs fill up.

    A batch of their own would double their cost and make dearer options look as cheap.
    """
    alone = np.array(batches.seconds)
    counts = np.arange(alone.size)
    size = min(ESCALATION_FILL_ROWS, alone.size - 1)
    expected: Floats = np.interp(escalation.share * rows, counts, np.minimum(alone, counts * (alone[size] / size)))
    return expected


def split_table(points: Sequence[Point], task: str, most_rows: int) -> SplitTable:
    """Return the table of these points for a task, cached while nothing in it changes."""
    return _cached_table(tuple(_costs(point, task, most_rows) for point in points))


@lru_cache(maxsize=64)
def _cached_table(costs: tuple[PointCost, ...]) -> SplitTable:
    return SplitTable(costs)


def _costs(point: Point, task: str, most_rows: int) -> PointCost:
    accuracy = round(point.accuracy_for(task) / UNIT) * UNIT
    return PointCost(point.name, accuracy, profiled(point, most_rows), _escalations_of(point, task), point.variant)


def _escalations_of(point: Point, task: str) -> tuple[Escalation, ...]:
    """Return the escalations profiled for a task; those profiled on all tasks say nothing about a single one."""
    if not task:
        return tuple(escalation for escalation in point.escalations if not escalation.by_task)
    by_task = ((escalation, escalation.by_task[task]) for escalation in point.escalations if task in escalation.by_task)
    return tuple(
        replace(escalation, share=of.share, accuracy=of.accuracy) for escalation, of in by_task if 0 < of.share < 1
    )
