"""The cheapest ways to split the rows of a job over operating points and batches: every size, every accuracy. Pure.

MOSEL (section 5.1) solves a program for each size and accuracy. It separates: the cheapest batches of one way to answer
are an unbounded knapsack, and ways are then joined one at a time, keeping for each size the splits that no other beats
in both accuracy and time. So all sizes and all accuracies come out of one pass, exact to `UNIT` of accuracy a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

UNIT = 1e-4
"""Accuracies are rounded to this: far below what any held-out set can tell apart."""
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SplitOption:
    """One way to answer rows: at a point, or at one and then, for the least certain rows, at another.

    Attributes:
        name: as splits tell it.
        accuracy: expected of each row, 0…1.
        seconds: of 0, 1, 2, … rows in their cheapest batches.
    """

    name: str
    accuracy: float
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ParetoFront:
    """The splits of one job size that no other beats, from the fastest to the most accurate.

    Attributes:
        accuracy: expected of a row on average, ascending. Shape (splits,).
        seconds: of all its batches, one after the other, ascending. Shape (splits,).
        rows: how many rows each way gets. Shape (splits, ways).
    """

    accuracy: Floats
    seconds: Floats
    rows: Integers


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """Rows in their cheapest batches: seconds of 0, 1, 2, … rows, and the size of the first batch of so many."""

    seconds: tuple[float, ...]
    first: tuple[int, ...]

    def sizes(self, rows: int) -> list[int]:
        """The sizes of the batches, largest first."""
        sizes = []
        while rows:
            sizes.append(self.first[rows])
            rows -= sizes[-1]
        return sorted(sizes, reverse=True)


def cheapest_batches(batch_seconds: Sequence[float], most_rows: int) -> BatchSplit:
    """Split 0 to `max_rows` rows into the batches that take least together, one after the other.

    Args:
        batch_seconds: of a batch of 1, 2, … rows.
        most_rows: the largest job.
    """
    single = np.asarray(batch_seconds, dtype=np.float64)
    if not single.size or single.min() < 0:
        raise ValueError("seconds of batches must be given for 1, 2, … rows, each 0 or more")
    seconds, first = np.zeros(most_rows + 1), [0] * (most_rows + 1)
    for rows in range(1, most_rows + 1):
        size = min(rows, single.size)
        totals = single[:size] + seconds[rows - size : rows][::-1]
        best = int(np.argmin(totals))
        seconds[rows], first[rows] = totals[best], best + 1
    return BatchSplit(tuple(seconds.tolist()), tuple(first))


def pareto_fronts(ways: Sequence[SplitOption], most_rows: int) -> list[ParetoFront]:
    """The front of every job size 0 to `max_rows`."""
    labels = [_Labels.nothing(len(ways)), *(_Labels.none(len(ways)) for _ in range(most_rows))]
    for place, way in enumerate(ways):
        if len(way.seconds) <= most_rows:
            raise ValueError(
                f"way {way.name!r} tells the seconds of up to {len(way.seconds) - 1} rows, not {most_rows}"
            )
        labels = [_extend_splits(labels, rows, place, way) for rows in range(most_rows + 1)]
    return [
        ParetoFront(label.units.astype(np.float64) * (UNIT / max(rows, 1)), label.seconds, label.rows)
        for rows, label in enumerate(labels)
    ]


def undominated(ways: Sequence[SplitOption]) -> list[SplitOption]:
    """Leave out the ways that another is never slower nor less accurate than; of equals the first stays."""
    accuracy = np.array([way.accuracy for way in ways])
    as_good = never_slower(ways) & (accuracy[:, None] >= accuracy)
    before = np.tri(len(ways), k=-1, dtype=bool).T
    beaten = np.any(as_good & (before | ~as_good.T), axis=0)
    return [way for way, loses in zip(ways, beaten, strict=True) if not loses]


def never_slower(ways: Sequence[SplitOption]) -> NDArray[np.bool_]:
    """Whether each way (by rows) takes no longer than each other (by columns), for any number of rows of a job."""
    seconds = np.array([way.seconds for way in ways]).reshape(len(ways), len(ways[0].seconds) if ways else 0)
    never: NDArray[np.bool_] = np.all(seconds[:, None] <= seconds, axis=2)
    return never


def accuracy_units(accuracy: float) -> int:
    """Accuracy of one row in whole units."""
    return round(accuracy / UNIT)


@dataclass(frozen=True, slots=True, eq=False)
class _Labels:
    """Splits in the making: units of accuracy of all rows together, seconds, and rows of each way."""

    units: Integers
    seconds: Floats
    rows: Integers

    @staticmethod
    def nothing(ways: int) -> "_Labels":
        """The one split of no rows."""
        return _Labels(np.zeros(1, np.int64), np.zeros(1), np.zeros((1, ways), np.int64))

    @staticmethod
    def none(ways: int) -> "_Labels":
        """No split at all."""
        return _Labels(np.zeros(0, np.int64), np.zeros(0), np.zeros((0, ways), np.int64))


def _extend_splits(before: Sequence[_Labels], rows: int, place: int, way: SplitOption) -> _Labels:
    """All splits of so many rows that give any number of them to one more way; the beaten are left out."""
    shares = [(more, before[rows - more]) for more in range(rows + 1) if before[rows - more].units.size]
    if not shares:
        return before[rows]
    per_row = accuracy_units(way.accuracy)
    units = np.concatenate([label.units + more * per_row for more, label in shares])
    seconds = np.concatenate([label.seconds + way.seconds[more] for more, label in shares])
    kept = _undominated_indices(units, seconds)
    source = np.repeat(np.arange(len(shares)), [label.units.size for _, label in shares])[kept]
    counts = np.concatenate([label.rows for _, label in shares])[kept]
    counts[:, place] = np.array([more for more, _ in shares])[source]
    return _Labels(units[kept], seconds[kept], counts)


def _undominated_indices(units: Integers, seconds: Floats) -> Integers:
    """Places of those that are faster than all that are as accurate, from the fastest on."""
    order = np.lexsort((-units, seconds))
    best = np.maximum.accumulate(units[order])
    risen = np.ones(order.size, dtype=bool)
    risen[1:] = best[1:] > best[:-1]
    return order[risen]
