"""What waits, in the units that are planned: a job, a part of a large one, or small ones as one batch. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from trimtab_pipelines.row_splits import UNIT, Floats, Integers
from trimtab_router.scheduling.policies.interface import ANSWER_SECONDS, Dispatch, Point, SchedulerView
from trimtab_router.scheduling.policies.option_cache import OptionCache, ScaledSplits, undominated
from trimtab_router.scheduling.policies.split_table import MOST_ROWS, ServingOption, SplitSet, SplitTable
from trimtab_router.scheduling.stage_request import RowSlice, Signature

_Kind = tuple[Signature, str, str | None, int]
SMALL_SHARE = 4
"""A job of less than this part of a batch goes with others; a larger one may be split over several points."""
MOST_PLANNED = 256
"""Slices that are looked at: what comes after them leaves long after this departure."""


@dataclass(slots=True, eq=False)
class JobGroup:
    """Rows that are planned as one.

    Attributes:
        slices: of which they are, most urgent first; of the last maybe not all.
        rows: of all.
        deadline: by which this stage must be done with the first.
        floor: mean accuracy that none may stay below.
        worth: what an answer to all of them is worth, their accuracy aside; `FLOOR_WORTH` of it where they have one
            that is below their floor, 0 where they have one that keeps it.
        weight: what a right answer to a row is worth, on average.
        known: accuracy of the answers they have, on average; 0 without.
    """

    slices: list[RowSlice]
    rows: int
    deadline: float
    floor: float = 0.0
    worth: float = 0.0
    weight: float = 0.0
    known: float = 0.0

    def add(self, piece: RowSlice, rows: int, deadline: float) -> None:
        """One more, of which so many rows."""
        work, total = piece.work, self.rows + rows
        known = piece.provisional.accuracy if piece.provisional is not None else 0.0
        self.weight += (work.wish.utility - self.weight) * rows / total
        self.known += (known - self.known) * rows / total
        worth = work.wish.utility * _URGENCY ** (3 - work.wish.priority) * rows / work.rows
        if piece.provisional is None:
            self.floor = max(self.floor, piece.work.missing_accuracy)
            self.worth += worth
        elif known < work.accuracy_floor:
            self.worth += FLOOR_WORTH * worth
        self.slices.append(piece)
        self.rows, self.deadline = total, min(self.deadline, deadline)

    @property
    def head(self) -> RowSlice:
        """The most urgent."""
        return self.slices[0]


FLOOR_WORTH = 0.5
"""Of an answer's worth, what it is worth that it keeps its floor; the rest is that it is there at all."""
_URGENCY = 30.0
"""How many answers of one priority are worth one of the next higher."""


@dataclass(frozen=True, slots=True, eq=False)
class JobOptions:
    """What a unit may choose among, from the fastest on: each is a split of the page at its place."""

    book: SplitTable
    page: SplitSet
    places: Integers
    seconds: Floats
    values: Floats
    least: float = 1.0
    """Of the unit's worth, the share that the first option gives."""

    def lines(self, option: int) -> list[tuple[ServingOption, int]]:
        """The lines of an option and their rows, the most accurate line first."""
        rows = self.page.rows[self.places[option]]
        given = [(self.book.lines[place], int(rows[place])) for place in rows.nonzero()[0]]
        return sorted(given, key=lambda one: -one[0].way.accuracy)


def group_jobs(menu: OptionCache, most: int, sizes: Sequence[int] = ()) -> list[JobGroup]:
    """The first units along the queue, by deadline.

    Args:
        menu: of a view.
        most: how many at most.
        sizes: the most rows that the first, second, … are made up to from small jobs; none: each job by itself.
    """
    view = menu.view
    found: list[JobGroup] = []
    open_units: dict[_Kind, tuple[JobGroup, int]] = {}
    for piece in islice(view.waiting, MOST_PLANNED):
        deadline = piece.work.due_at - view.later_seconds
        if piece.provisional is not None:
            deadline -= ANSWER_SECONDS  # then what is known leaves
        small = bool(sizes) and not piece.alone and SMALL_SHARE * piece.rows <= view.most_rows
        kind = _kind(menu, piece) if small else None
        mate, room = open_units.get(kind, (None, 0)) if kind is not None else (None, 0)
        if mate is not None and mate.rows + piece.rows <= room:
            mate.add(piece, piece.rows, deadline)
            continue
        for rows in _parts(piece.rows):
            if len(found) == most:
                return found
            unit = JobGroup([], 0, deadline)
            unit.add(piece, rows, deadline)
            found.append(unit)
        if kind is not None:
            open_units[kind] = (found[-1], sizes[min(len(found), len(sizes)) - 1])
    return found


def _kind(menu: OptionCache, piece: RowSlice) -> _Kind | None:
    """What slices have in common that go together; None where a mix of points of its own costs a slice less."""
    work, again = piece.work, piece.again
    floor = piece.work.missing_accuracy if piece.provisional is None else 0.0
    level = 0
    if floor:
        fare = menu.fare((piece,))
        level = fare.level(floor)
        if not fare.goes_with_others(piece.rows, floor):
            return None
    return work.signature, work.wish.task, again.point if again else None, level


def _parts(rows: int) -> Iterator[int]:
    while rows > 0:
        yield min(rows, MOST_ROWS)
        rows -= MOST_ROWS


def job_options(menu: OptionCache, unit: JobGroup, *, mixed: bool, looks: bool = True) -> JobOptions | None:
    """What a unit may choose among; None where nothing reaches its floor.

    Args:
        menu: the points, and what they take now.
        unit: the rows.
        mixed: whether they may go at several points.
        looks: whether the least certain may be looked at again.
    """
    fare = menu.fare(unit.slices)
    card = fare.card(unit.rows, mixed=mixed and not unit.known, looks=looks and not unit.known)
    if unit.known:
        return _better(unit, fare.book, card)
    begin = card.reaching(unit.floor)
    if begin == card.seconds.size:
        return None
    weight = unit.weight * unit.rows
    found = JobOptions(fare.book, card.page, card.places[begin:], card.seconds[begin:], card.accuracy[begin:] * weight)
    return _with_first_pass(unit, found, card, begin) if unit.floor and looks else found


def _with_first_pass(unit: JobGroup, found: JobOptions, card: ScaledSplits, begin: int) -> JobOptions:
    """What a unit may choose among, and at worst the first pass alone: an answer is there, and says it is provisional.

    Rows that are doubted wait for their second look all the same, and get it if there is time after all.
    """
    option = card.quickest(begin)
    seconds = card.passes[option]
    if seconds >= found.seconds[0]:
        return found
    place = card.places[option]
    line = found.book.lines[int(card.page.rows[place].argmax())]
    value = min(found.book.costs[line.point].accuracy * unit.rows * unit.weight, float(found.values[0]))
    return JobOptions(
        found.book,
        found.page,
        np.concatenate([[place], found.places]),
        np.concatenate([[seconds], found.seconds]),
        np.concatenate([[value], found.values]),
        1.0 - FLOOR_WORTH,
    )


def _better(unit: JobGroup, book: SplitTable, card: ScaledSplits) -> JobOptions | None:
    """What rows may choose among that have an answer: what is more accurate than that, and how much.

    A second look that was measured has the accuracy it was measured to have. How accurate any other point is on rows
    that were picked out nobody knows: less than on all.
    """
    accuracy, meant = card.accuracy, unit.head.again
    if meant is not None and meant.accuracy is not None:
        point = next((place for place, cost in enumerate(book.costs) if cost.name == meant.point), -2)
        accuracy = np.where(card.sole == point, meant.accuracy, 0.0)
    fit = ((accuracy >= unit.floor - UNIT / 2) & (accuracy > unit.known)).nonzero()[0]
    if not fit.size:
        return None
    fit = fit[undominated(card.seconds[fit], accuracy[fit])]
    gain = (accuracy[fit] - unit.known) * (unit.weight * unit.rows)
    return JobOptions(book, card.page, card.places[fit], card.seconds[fit], gain)


def dispatch_first_batch(
    menu: OptionCache,
    unit: JobGroup,
    line: ServingOption,
    rows: int,
    mates: Sequence[RowSlice] = (),
    spare_seconds: float = 0.0,
) -> Dispatch:
    """Let the first batch of so many rows of a unit leave by a line.

    Args:
        menu: the points.
        unit: whose rows go first.
        line: how they go.
        rows: of the unit that go that way.
        mates: others that may fill the batch, most urgent first.
        spare_seconds: how much longer the batch may take for their sake.
    """
    fare = menu.fare(unit.slices)
    point, size = fare.points[line.point], fare.book.batches[line.point].first[rows]
    takes = first_rows(unit.slices, size)
    if mates and spare_seconds > 0 and not unit.head.alone:
        takes += first_rows(mates, remaining_capacity(menu.view, point, size, spare_seconds))
    return Dispatch(point, takes, again=line.look.again if line.look is not None else None)


def shares_batch(point: Point, head: RowSlice, piece: RowSlice) -> bool:
    """Whether the shapes of what a point reads of them are the same."""
    return not piece.alone and _read_of(point, head) == _read_of(point, piece)


def _read_of(point: Point, piece: RowSlice) -> Signature:
    signature = piece.work.signature
    return signature if point.reads is None else tuple(entry for entry in signature if entry[0] in point.reads)


def first_rows(slices: Iterable[RowSlice], rows: int) -> list[RowSlice]:
    """The first so many rows of these."""
    taken: list[RowSlice] = []
    for piece in slices:
        if rows <= 0:
            break
        taken.append(piece if piece.rows <= rows else piece.first(rows))
        rows -= taken[-1].rows
    return taken


def remaining_capacity(view: SchedulerView, point: Point, size: int, spare_seconds: float) -> int:
    """How many rows more the batch may have."""
    limit = point.seconds(size) + spare_seconds
    low, high = size, view.most_rows
    if point.seconds(high) <= limit:
        return high - size
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if point.seconds(middle) <= limit else (low, middle)
    return low - size
