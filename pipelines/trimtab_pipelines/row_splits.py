"""Optimal splits of a job's rows over operating points and batches, for every job size and accuracy.

MOSEL (section 5.1) solves one program for each size and accuracy. The program separates: the cheapest batches of one
option are an unbounded knapsack, and options are then added one at a time, keeping for each size the Pareto-optimal
splits in accuracy and time. One pass computes all sizes and accuracies, exact to `UNIT` of accuracy per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

UNIT = 1e-4
"""Resolution of accuracies, far below what a held-out set can distinguish."""
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SplitOption:
    """An option of serving rows: one operating point, or one followed by an escalation of low-confidence rows."""

    name: str
    accuracy: float
    """Expected accuracy of each row, 0…1."""
    seconds: tuple[float, ...]
    """Seconds of 0, 1, 2, … rows in their cheapest batches."""


@dataclass(frozen=True, slots=True, eq=False)
class ParetoFront:
    """Pareto-optimal splits of one job size, from the fastest to the most accurate."""

    accuracy: Floats
    """Mean expected accuracy of a row, ascending. Shape (splits,)."""
    seconds: Floats
    """Seconds of all batches in sequence, ascending. Shape (splits,)."""
    rows: Integers
    """Rows of each option. Shape (splits, options)."""


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """Cheapest batches of 0, 1, 2, … rows: their total seconds, and the size of the first batch."""

    seconds: tuple[float, ...]
    first: tuple[int, ...]

    def sizes(self, rows: int) -> list[int]:
        """The sizes of the batches, largest first."""
        sizes = []
        while rows:
            sizes.append(self.first[rows])
            rows -= sizes[-1]
        return sorted(sizes, reverse=True)


def cheapest_batches(batch_seconds: Sequence[float], max_rows: int) -> BatchSplit:
    """Split 0 to `max_rows` rows into the batches with the least total seconds, given those of 1, 2, … rows."""
    single = np.asarray(batch_seconds, dtype=np.float64)
    if not single.size or single.min() < 0:
        raise ValueError("batch_seconds must hold 1, 2, … rows, each 0 or more")
    seconds, first = np.zeros(max_rows + 1), [0] * (max_rows + 1)
    for rows in range(1, max_rows + 1):
        size = min(rows, single.size)
        totals = single[:size] + seconds[rows - size : rows][::-1]
        best = int(np.argmin(totals))
        seconds[rows], first[rows] = totals[best], best + 1
    return BatchSplit(tuple(seconds.tolist()), tuple(first))


def pareto_fronts(options: Sequence[SplitOption], max_rows: int) -> list[ParetoFront]:
    labels = [_Labels.nothing(len(options)), *(_Labels.none(len(options)) for _ in range(max_rows))]
    for index, option in enumerate(options):
        if len(option.seconds) <= max_rows:
            raise ValueError(
                f"option {option.name!r} has the seconds of up to {len(option.seconds) - 1} rows, not {max_rows}"
            )
        labels = [_extend_splits(labels, rows, index, option) for rows in range(max_rows + 1)]
    return [
        ParetoFront(label.units.astype(np.float64) * (UNIT / max(rows, 1)), label.seconds, label.rows)
        for rows, label in enumerate(labels)
    ]


def undominated(options: Sequence[SplitOption]) -> list[SplitOption]:
    """Options that no other dominates in accuracy and seconds; of equal ones the first."""
    accuracy = np.array([option.accuracy for option in options])
    as_good = never_slower(options) & (accuracy[:, None] >= accuracy)
    before = np.tri(len(options), k=-1, dtype=bool).T
    beaten = np.any(as_good & (before | ~as_good.T), axis=0)
    return [option for option, loses in zip(options, beaten, strict=True) if not loses]


def never_slower(options: Sequence[SplitOption]) -> NDArray[np.bool_]:
    """Whether each option (rows) takes no longer than each other (columns), for any number of rows."""
    seconds = np.array([option.seconds for option in options]).reshape(
        len(options), len(options[0].seconds) if options else 0
    )
    never: NDArray[np.bool_] = np.all(seconds[:, None] <= seconds, axis=2)
    return never


@dataclass(frozen=True, slots=True, eq=False)
class _Labels:
    """Partial splits: accuracy units of all rows, seconds, and rows of each option."""

    units: Integers
    seconds: Floats
    rows: Integers

    @staticmethod
    def nothing(options: int) -> "_Labels":
        """The one split of no rows."""
        return _Labels(np.zeros(1, np.int64), np.zeros(1), np.zeros((1, options), np.int64))

    @staticmethod
    def none(options: int) -> "_Labels":
        return _Labels(np.zeros(0, np.int64), np.zeros(0), np.zeros((0, options), np.int64))


def _extend_splits(before: Sequence[_Labels], rows: int, index: int, option: SplitOption) -> _Labels:
    """Pareto-optimal splits of a number of rows after adding an option."""
    shares = [(count, before[rows - count]) for count in range(rows + 1) if before[rows - count].units.size]
    if not shares:
        return before[rows]
    per_row = round(option.accuracy / UNIT)
    units = np.concatenate([label.units + count * per_row for count, label in shares])
    seconds = np.concatenate([label.seconds + option.seconds[count] for count, label in shares])
    retained = _undominated_indices(units, seconds)
    source = np.repeat(np.arange(len(shares)), [label.units.size for _, label in shares])[retained]
    counts = np.concatenate([label.rows for _, label in shares])[retained]
    counts[:, index] = np.array([count for count, _ in shares])[source]
    return _Labels(units[retained], seconds[retained], counts)


def _undominated_indices(units: Integers, seconds: Floats) -> Integers:
    """Indices of the Pareto-optimal splits, fastest first."""
    order = np.lexsort((-units, seconds))
    best = np.maximum.accumulate(units[order])
    risen = np.ones(order.size, dtype=bool)
    risen[1:] = best[1:] > best[:-1]
    return order[risen]
