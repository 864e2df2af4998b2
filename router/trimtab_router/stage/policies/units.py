"""What waits, in the units that are planned: a job, a part of a large one, or small ones as one batch. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from trimtab_pipelines.splits import UNIT, Floats, Integers
from trimtab_router.stage.policies.book import MOST_ROWS, Book, Line, Page, book_of, profiled
from trimtab_router.stage.policies.view import ANSWER_SECONDS, Departure, Point, View
from trimtab_router.stage.queue import MOST_SLICES
from trimtab_router.stage.work import Again, Signature, Slice

_Kind = tuple[Signature, str, str | None, int]
SMALL_SHARE = 4
"""A job of less than this part of a batch goes with others; a larger one may be split over several points."""


@dataclass(slots=True, eq=False)
class Unit:
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

    slices: list[Slice]
    rows: int
    deadline: float
    floor: float = 0.0
    worth: float = 0.0
    weight: float = 0.0
    known: float = 0.0

    def add(self, piece: Slice, rows: int, deadline: float) -> None:
        """One more, of which so many rows."""
        work, total = piece.work, self.rows + rows
        known = piece.provisional.accuracy if piece.provisional is not None else 0.0
        self.weight += (work.wish.utility - self.weight) * rows / total
        self.known += (known - self.known) * rows / total
        worth = work.wish.utility * _URGENCY ** (3 - work.wish.priority) * rows / work.rows
        if piece.provisional is None:
            self.floor = max(self.floor, missing_accuracy(piece))
            self.worth += worth
        elif known < work.accuracy_floor:
            self.worth += FLOOR_WORTH * worth
        self.slices.append(piece)
        self.rows, self.deadline = total, min(self.deadline, deadline)

    @property
    def head(self) -> Slice:
        """The most urgent."""
        return self.slices[0]


FLOOR_WORTH = 0.5
"""Of an answer's worth, what it is worth that it keeps its floor; the rest is that it is there at all."""
_URGENCY = 30.0
"""How many answers of one priority are worth one of the next higher."""


@dataclass(frozen=True, slots=True, eq=False)
class Offers:
    """What a unit may choose among, from the fastest on: each is a split of the page at its place."""

    book: Book
    page: Page
    places: Integers
    seconds: Floats
    values: Floats
    least: float = 1.0
    """Of the unit's worth, the share that the first option gives."""

    def lines(self, option: int) -> list[tuple[Line, int]]:
        """The lines of an option and their rows, the most accurate line first."""
        rows = self.page.rows[self.places[option]]
        given = [(line, int(count)) for line, count in zip(self.book.lines, rows, strict=True) if count]
        return sorted(given, key=lambda one: -one[0].way.accuracy)


def missing_accuracy(piece: Slice) -> float:
    """The mean accuracy that the rows of a work that still wait must have, so that all together reach its floor."""
    work = piece.work
    if not work.accuracy_floor:
        return 0.0
    return (work.accuracy_floor * work.rows - work.promised) / max(work.queued_rows, 1)


def units(view: View, most: int, sizes: Sequence[int] = ()) -> list[Unit]:
    """The first units along the queue, by deadline.

    Args:
        view: what waits.
        most: how many at most.
        sizes: the most rows that the first, second, … are made up to from small jobs; none: each job by itself.
    """
    found: list[Unit] = []
    open_units: dict[_Kind, tuple[Unit, int]] = {}
    for piece in islice(view.waiting, MOST_SLICES):
        deadline = piece.work.deadline - view.later_seconds
        if piece.provisional is not None:
            deadline -= ANSWER_SECONDS  # then what is known leaves
        out_of_reach = _out_of_reach(view, piece)
        small = bool(sizes) and not piece.alone and SMALL_SHARE * piece.rows <= view.most_rows
        small = small and (not out_of_reach or piece.rows == 1)  # else a mix of points may do for it
        again = piece.again.point if piece.again else None
        kind = (piece.work.signature, piece.work.wish.task, again, out_of_reach)
        mate, room = open_units.get(kind, (None, 0))
        if small and mate is not None and mate.rows + piece.rows <= room:
            mate.add(piece, piece.rows, deadline)
            continue
        for rows in _parts(piece.rows):
            if len(found) == most:
                return found
            unit = Unit([], 0, deadline)
            unit.add(piece, rows, deadline)
            found.append(unit)
        if small:
            open_units[kind] = (found[-1], sizes[min(len(found), len(sizes)) - 1])
    return found


def _out_of_reach(view: View, piece: Slice) -> int:
    """How many of the points do not reach a slice's floor alone."""
    if not piece.work.accuracy_floor or piece.provisional is not None:
        return 0
    floor, task = missing_accuracy(piece) - UNIT / 2, piece.work.wish.task
    return sum(point.accuracy_for(task) < floor for point in view.points)


def _parts(rows: int) -> Iterator[int]:
    while rows > 0:
        yield min(rows, MOST_ROWS)
        rows -= MOST_ROWS


def points_of(view: View, slices: Sequence[Slice]) -> list[Point]:
    """The points that read nothing that any of these has not; where there are none those that read anything of all."""
    names = {name for name, _ in slices[0].work.signature}
    for piece in slices[1:]:
        if piece.work.signature != slices[0].work.signature:
            names &= {name for name, _ in piece.work.signature}
    whole = [point for point in view.points if point.reads is not None and point.reads <= names]
    whole += [point for point in view.points if point.reads is None]
    return whole or [p for p in view.points if all(map(p.reads_any_of, slices))] or list(view.points)


def offers(view: View, unit: Unit, *, mixed: bool, looks: bool = True) -> Offers | None:
    """What a unit may choose among; None where nothing reaches its floor.

    Args:
        view: the points, and what they take now.
        unit: the rows.
        mixed: whether they may go at several points.
        looks: whether the least certain may be looked at again.
    """
    points = points_of(view, unit.slices)
    book = book_of(points, unit.head.work.wish.task, view.most_rows)
    page = book.mixed(unit.rows) if mixed else book.plain(unit.rows)
    ratios = _ratios(points, view.most_rows)
    seconds = page.seconds(ratios)
    gain = _accuracies(unit, book, page) - unit.known
    fit = gain + unit.known >= unit.floor - UNIT / 2
    if unit.known:
        fit &= gain > 0
    if unit.known or not looks:
        twice = np.array([line.look is not None for line in book.lines])
        fit &= ~(page.rows[:, twice] > 0).any(axis=1)
    places = fit.nonzero()[0]
    places = places[unbeaten(seconds[places], gain[places])]
    if not places.size:
        return None
    found = Offers(book, page, places, seconds[places], gain[places] * (unit.weight * unit.rows))
    return _with_first_pass(unit, found, ratios) if unit.floor and not unit.known and looks else found


def _with_first_pass(unit: Unit, found: Offers, ratios: Floats) -> Offers:
    """What a unit may choose among, and at worst the first pass alone: an answer is there, and says it is provisional.

    Rows that are doubted wait for their second look all the same, and get it if there is time after all.
    """
    shortest: tuple[float, int, float] | None = None
    for option, place in enumerate(found.places):
        counts = found.page.rows[place]
        (lines,) = counts.nonzero()
        line = found.book.lines[lines[0]]
        if lines.size == 1 and line.look is not None:
            seconds = found.book.batches[line.point].seconds[unit.rows] * float(ratios[line.point])
            if shortest is None or seconds < shortest[0]:
                shortest = (seconds, option, found.book.costs[line.point].accuracy)
    if shortest is None or shortest[0] >= found.seconds[0]:
        return found
    seconds, option, accuracy = shortest
    value = min(accuracy * unit.rows * unit.weight, float(found.values[0]))
    return Offers(
        found.book,
        found.page,
        np.concatenate([found.places[option : option + 1], found.places]),
        np.concatenate([[seconds], found.seconds]),
        np.concatenate([[value], found.values]),
        1.0 - FLOOR_WORTH,
    )


def _accuracies(unit: Unit, book: Book, page: Page) -> Floats:
    """Accuracy of each split; a second look that was measured has the accuracy it was measured to have."""
    meant = unit.head.again
    if meant is None or meant.accuracy is None:
        return page.accuracy
    names = [book.costs[line.point].name == meant.point for line in book.lines]
    as_meant = (page.rows * np.array(names)).sum(axis=1) == unit.rows
    return np.where(as_meant, meant.accuracy, page.accuracy)


def unbeaten(seconds: Floats, values: Floats) -> Integers:
    """Places of those worth more than all that are no slower, from the fastest on."""
    if seconds.size < 2 or ((seconds[1:] > seconds[:-1]).all() and (values[1:] > values[:-1]).all()):
        return np.arange(seconds.size)
    order = np.lexsort((-values, seconds))
    best = np.maximum.accumulate(values[order])
    rising: Integers = order[np.concatenate([[True], best[1:] > best[:-1]])]
    return rising


def _ratios(points: Iterable[Point], most_rows: int) -> Floats:
    """What each point takes now by what was profiled."""
    pairs = [(point.seconds(most_rows), profiled(point, most_rows)[-1]) for point in points]
    return np.array([now / before if before > 0 else 1.0 for now, before in pairs])


def departure(
    view: View, unit: Unit, line: Line, rows: int, mates: Sequence[Slice] = (), spare_seconds: float = 0.0
) -> Departure:
    """Let the first batch of so many rows of a unit leave by a line.

    Args:
        view: what waits.
        unit: whose rows go first.
        line: how they go.
        rows: of the unit that go that way.
        mates: others that may fill the batch, most urgent first.
        spare_seconds: how much longer the batch may take for their sake.
    """
    points = points_of(view, unit.slices)
    point = points[line.point]
    size = book_of(points, unit.head.work.wish.task, view.most_rows).batches[line.point].first[rows]
    takes = first_rows(unit.slices, size)
    if mates and spare_seconds > 0 and not unit.head.alone:
        takes += first_rows(mates, room_beside(view, point, size, spare_seconds))
    look = line.look
    again = Again(look.below, look.point, look.accuracy) if look is not None else None
    return Departure(point, takes, again=again)


def shares_batch(point: Point, head: Slice, piece: Slice) -> bool:
    """Whether the shapes of what a point reads of them are the same."""
    return not piece.alone and _read_of(point, head) == _read_of(point, piece)


def _read_of(point: Point, piece: Slice) -> Signature:
    signature = piece.work.signature
    return signature if point.reads is None else tuple(entry for entry in signature if entry[0] in point.reads)


def first_rows(slices: Iterable[Slice], rows: int) -> list[Slice]:
    """The first so many rows of these."""
    taken: list[Slice] = []
    for piece in slices:
        if rows <= 0:
            break
        taken.append(piece if piece.rows <= rows else piece.first(rows))
        rows -= taken[-1].rows
    return taken


def room_beside(view: View, point: Point, size: int, spare_seconds: float) -> int:
    """How many rows more the batch may have."""
    limit = point.seconds(size) + spare_seconds
    low, high = size, view.most_rows
    if point.seconds(high) <= limit:
        return high - size
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if point.seconds(middle) <= limit else (low, middle)
    return low - size
