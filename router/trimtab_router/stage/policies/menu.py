"""What may serve which rows, and what that costs now: looked up once a decision, kept from one to the next. Pure.

A book tells seconds as profiled; how much longer each point takes now scales them. These ratios are rounded to steps
of two percent, so that what was found at one ratio serves many decisions.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import exp, inf, log

import numpy as np

from trimtab_pipelines.splits import UNIT, Floats, Integers
from trimtab_router.stage.policies.book import MOST_ROWS, NONE, Book, Page, book_of, profiled
from trimtab_router.stage.policies.view import Point, View
from trimtab_router.stage.work import Slice

RATIO_STEP = 0.02
Ratios = tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Card:
    """The splits of a page that no other beats at what they cost now, from the fastest on.

    Attributes:
        places: theirs on the page. Shape (splits,), as all here.
        seconds: ascending.
        accuracy: of a row on average, ascending.
        sole: the point that all rows go to, alone and once; NONE where there are several.
        passes: seconds of the first look alone, where all rows go one way that looks twice; else infinite.
        quickest: of those from each on, the one whose first look alone takes least.
    """

    page: Page
    places: Integers
    seconds: Floats
    accuracy: Floats
    sole: Integers
    passes: Floats
    quickest: Integers

    def reaching(self, floor: float) -> int:
        """The first that reaches a floor; how many there are where none does."""
        return int(self.accuracy.searchsorted(floor - UNIT / 2))


@dataclass(slots=True, eq=False)
class Fare:
    """The points that may serve rows of one kind, their book, and what each takes now by what was profiled."""

    points: Sequence[Point]
    book: Book
    ratios: Ratios
    most_rows: int
    _levels: list[float] | None = field(default=None)

    def card(self, rows: int, *, mixed: bool, looks: bool = True) -> Card:
        """The card of so many rows; `mixed`: which may go several ways, `looks`: and be looked at twice."""
        return _card(self.book, rows, self.ratios, mixed, looks)

    def level(self, floor: float) -> int:
        """Which ways reach a floor, as a number: floors of one number are reached by the same."""
        if not floor:
            return 0
        if self._levels is None:
            self._levels = self.card(self.most_rows, mixed=False).accuracy.tolist()
        return bisect_left(self._levels, floor - UNIT / 2)

    def goes_with_others(self, rows: int, floor: float) -> bool:
        """Whether a row of so many costs no more in a full batch that goes one way than in a mix of its own."""
        if not floor or rows == 1:
            return True
        full, own = self.card(self.most_rows, mixed=False), self.card(rows, mixed=True)
        one_way, mix = full.reaching(floor), own.reaching(floor)
        if one_way == full.seconds.size or mix == own.seconds.size:
            return False
        return bool(full.seconds[one_way] * rows <= own.seconds[mix] * self.most_rows)


class Menu:
    """What a view's points offer; made for one decision."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._every = _Same(view.points)
        self._fares: dict[tuple[frozenset[str], str], Fare] = {}

    def fare(self, slices: Sequence[Slice]) -> Fare:
        """What rows that leave together may choose among: all but points that read what one of them lacks."""
        names = _names(slices[0])
        for piece in slices[1:]:
            names &= _names(piece)
        task = slices[0].work.wish.task
        found = self._fares.get((names, task))
        if found is None:
            found = self._fares[names, task] = self._made(names, task)
        return found

    def _made(self, names: frozenset[str], task: str) -> Fare:
        same, most_rows = _points_of(self._every, names), self.view.most_rows
        ratios = tuple(_ratio(point, most_rows) for point in same.points)
        if all(point.profiled for point in same.points):
            return Fare(same.points, _book(same, task, most_rows), ratios, most_rows)
        return Fare(same.points, book_of(same.points, task, most_rows), ratios, most_rows)


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


def prepare(points: Sequence[Point], most_rows: int) -> None:
    """Write the books of these points: of all of them, and of those that are left where inputs are absent.

    Jobs of up to ``MOST_ROWS`` rows find their splits there. On an event loop all other work would stand still.
    """
    every = _Same(points)
    kinds = {every, *(_points_of(every, point.reads) for point in points if point.reads is not None)}
    for same in sorted(kinds, key=lambda kind: -len(kind.points)):
        book_of(same.points, "", most_rows).mixed(MOST_ROWS)


def _names(piece: Slice) -> frozenset[str]:
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
def _book(same: _Same, task: str, most_rows: int) -> Book:
    return book_of(same.points, task, most_rows)


def _ratio(point: Point, most_rows: int) -> float:
    """What a point takes now by what was profiled, in steps."""
    before = profiled(point, most_rows)[-1]
    now = point.seconds(most_rows)
    if before <= 0 or now <= 0:
        return 1.0
    return exp(round(log(now / before) / RATIO_STEP) * RATIO_STEP)


@lru_cache(maxsize=4096)
def _card(book: Book, rows: int, ratios: Ratios, mixed: bool, looks: bool) -> Card:  # noqa: FBT001 - a key
    page = book.mixed(rows) if mixed else book.plain(rows)
    seconds = page.seconds(np.array(ratios))
    places = np.arange(seconds.size) if looks else np.flatnonzero(~page.twice)
    places = places[unbeaten(seconds[places], page.accuracy[places])]
    line, twice = page.line[places], page.twice[places]
    firsts = np.array([batches.seconds[rows] for batches in book.batches]) * ratios
    points = book.first_points[line]
    passes = np.where((line != NONE) & twice, firsts[points], inf)
    sole = np.where((line != NONE) & ~twice, points, NONE)
    return Card(page, places, seconds[places], page.accuracy[places], sole, passes, _quickest(passes))


def _quickest(passes: Floats) -> Integers:
    """Of those from each on, the place of the least."""
    behind = passes[::-1]
    least = np.minimum.accumulate(behind)
    newest = np.maximum.accumulate(np.where(behind == least, np.arange(passes.size), 0))
    found: Integers = passes.size - 1 - newest[::-1]
    return found


def unbeaten(seconds: Floats, values: Floats) -> Integers:
    """Places of those worth more than all that are no slower, from the fastest on."""
    if seconds.size < 2 or ((seconds[1:] > seconds[:-1]).all() and (values[1:] > values[:-1]).all()):
        return np.arange(seconds.size)
    order = np.lexsort((-values, seconds))
    best = np.maximum.accumulate(values[order])
    rising: Integers = order[np.concatenate([[True], best[1:] > best[:-1]])]
    return rising
