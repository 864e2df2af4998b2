"""What may serve which rows, and what that costs now: looked up once a decision, kept from one to the next. Pure.

A book tells seconds as profiled; how much longer each point takes now scales them. These ratios are rounded to steps
of two percent, so that what was found at one ratio serves many decisions.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import exp, log

import numpy as np

from trimtab_pipelines.row_splits import UNIT, Floats, Integers
from trimtab_router.scheduling.policies.interface import Point, SchedulerView
from trimtab_router.scheduling.policies.split_table import MOST_ROWS, SplitSet, SplitTable, profiled, split_table
from trimtab_router.scheduling.stage_request import RowSlice

RATIO_STEP = 0.02
Ratios = tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ScaledSplits:
    """The splits of a page that no other beats at what they cost now, from the fastest on.

    Attributes:
        places: theirs on the page. Shape (splits,), as all here.
        seconds: ascending.
        accuracy: of a row on average, ascending.
        sole: the point that all rows go to, alone and once; NONE where there are several.
        passes: seconds of the first look alone, where all rows go one way that looks twice; else infinite.
    """

    page: SplitSet
    places: Integers
    seconds: Floats
    accuracy: Floats
    sole: Integers
    passes: Floats

    def reaching(self, floor: float) -> int:
        """The first that reaches a floor; how many there are where none does."""
        return int(self.accuracy.searchsorted(floor - UNIT / 2))

    def quickest(self, begin: int) -> int:
        """Of those from one on, the one whose first look alone takes least."""
        return begin + int(self.passes[begin:].argmin())


@dataclass(slots=True, eq=False)
class PointOptions:
    """The points that may serve rows of one kind, their book, and what each takes now by what was profiled."""

    points: Sequence[Point]
    book: SplitTable
    ratios: Ratios
    most_rows: int
    _levels: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []), init=False)

    def card(self, rows: int, *, mixed: bool, looks: bool = True) -> ScaledSplits:
        """The card of so many rows; `mixed`: which may go several ways, `looks`: and be looked at twice.

        As long as somebody writes how they may go several ways, they go one: a decision waits for nothing.
        """
        return _card(self.book, rows, self.ratios, mixed and self.book.has_mixed(rows), looks)

    def level(self, floor: float) -> int:
        """Which ways reach a floor, as a number: floors of one number are reached by the same."""
        return bisect_left(self._full[0], floor - UNIT / 2) if floor else 0

    def goes_with_others(self, rows: int, floor: float) -> bool:
        """Whether a row of so many costs no more in a full batch that goes one way than in a mix of its own."""
        if not floor or rows == 1:
            return True
        seconds, own = self._full[1], self.card(rows, mixed=True)
        one_way, mix = self.level(floor), own.reaching(floor)
        if one_way == len(seconds) or mix == own.seconds.size:
            return False
        return bool(seconds[one_way] * rows <= own.seconds[mix] * self.most_rows)

    @property
    def _full(self) -> tuple[list[float], list[float]]:
        """Accuracies and seconds of full batches that go one way."""
        if not self._levels[0]:
            card = self.card(self.most_rows, mixed=False)
            self._levels = card.accuracy.tolist(), card.seconds.tolist()
        return self._levels


class OptionCache:
    """What a view's points offer; made for one decision.

    Args:
        view: what waits. Its batches may have more rows than a book is written for; those of `self.view` do not.
    """

    def __init__(self, view: SchedulerView) -> None:
        self.view = view if view.most_rows <= MOST_ROWS else replace(view, most_rows=MOST_ROWS)
        self._every = _Same(view.points)
        self._fares: dict[tuple[frozenset[str], str], PointOptions] = {}

    def fare(self, slices: Sequence[RowSlice]) -> PointOptions:
        """What rows that leave together may choose among: all but points that read what one of them lacks."""
        names = _names(slices[0])
        for piece in slices[1:]:
            names &= _names(piece)
        task = slices[0].work.wish.task
        found = self._fares.get((names, task))
        if found is None:
            found = self._fares[names, task] = _fare(_points_of(self._every, names), task, self.view.most_rows)
        return found


class _Same:
    """Points as a key: the same objects, whatever is in them."""

    __slots__ = ("_hash", "points")

    def __init__(self, points: Sequence[Point]) -> None:
        self.points = tuple(points)
        self._hash = hash(tuple(map(id, self.points)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or len(self.points) != len(other.points):
            return False
        return all(mine is theirs for mine, theirs in zip(self.points, other.points, strict=True))


def precompute_tables(points: Sequence[Point], most_rows: int) -> Callable[[], None]:
    """Have the books of these points written by another thread: of all, and of those left without inputs.

    Returns:
        What writes them, and the cards at what points take now; jobs of up to ``MOST_ROWS`` rows find their splits
        there. Until then decisions have jobs go one way: on an event loop all other work would stand still.
    """
    most_rows = min(most_rows, MOST_ROWS)
    every = _Same(points)
    kinds = {every, *(_points_of(every, point.reads) for point in points if point.reads is not None)}
    fares = [_fare(same, "", most_rows) for same in sorted(kinds, key=lambda kind: -len(kind.points))]
    for fare in fares:
        fare.book.awaited = fare.book.written < MOST_ROWS
    return partial(_write, fares)


def _write(fares: Sequence[PointOptions]) -> None:
    for fare in fares:
        try:
            fare.book.mixed(MOST_ROWS)
        finally:
            fare.book.awaited = False
        for rows in range(1, MOST_ROWS + 1):
            fare.card(rows, mixed=True)
            fare.card(rows, mixed=False)


def _fare(same: _Same, task: str, most_rows: int) -> PointOptions:
    ratios = tuple(_ratio(point, most_rows) for point in same.points)
    lasting = all(point.profiled for point in same.points)
    book = _book(same, task, most_rows) if lasting else split_table(same.points, task, most_rows)
    return PointOptions(same.points, book, ratios, most_rows)


def _names(piece: RowSlice) -> frozenset[str]:
    return _of_signature(piece.work.signature)


@lru_cache(maxsize=1024)
def _of_signature(signature: tuple[tuple[str, tuple[int, ...]], ...]) -> frozenset[str]:
    return frozenset(name for name, _ in signature)


@lru_cache(maxsize=256)
def _points_of(every: _Same, names: frozenset[str]) -> _Same:
    """The points that read nothing that is not there; where there are none those that read anything of it."""
    whole = [point for point in every.points if point.reads is not None and point.reads <= names]
    whole += [point for point in every.points if point.reads is None]
    any_of = [point for point in every.points if point.reads is None or point.reads & names]
    return _Same(whole or any_of or every.points)


@lru_cache(maxsize=256)
def _book(same: _Same, task: str, most_rows: int) -> SplitTable:
    return split_table(same.points, task, most_rows)


def _ratio(point: Point, most_rows: int) -> float:
    """What a point takes now by what was profiled, in steps."""
    before = profiled(point, most_rows)[-1]
    now = point.seconds(most_rows)
    if before <= 0 or now <= 0:
        return 1.0
    return exp(round(log(now / before) / RATIO_STEP) * RATIO_STEP)


@lru_cache(maxsize=4096)
def _card(book: SplitTable, rows: int, ratios: Ratios, mixed: bool, looks: bool) -> ScaledSplits:  # noqa: FBT001 - a key
    page = book.mixed(rows) if mixed else book.plain(rows)
    if not looks:
        page = page.only(np.flatnonzero(~page.twice))
    scales = np.array((*ratios, 1.0))
    seconds = page.seconds(scales[:-1])
    places = undominated(seconds, page.accuracy)
    passes = (book.firsts[rows] * scales)[page.passing[places]]
    return ScaledSplits(page, places, seconds[places], page.accuracy[places], page.sole[places], passes)


def undominated(seconds: Floats, values: Floats) -> Integers:
    """Places of those worth more than all that are no slower, from the fastest on."""
    order: Integers = np.lexsort((-values, seconds))
    best = np.maximum.accumulate(values[order])
    rising = np.ones(order.size, np.bool_)
    np.greater(best[1:], best[:-1], out=rising[1:])
    return order[rising]
