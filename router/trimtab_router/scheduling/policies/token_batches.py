"""Candidate batches: the queue grouped by deadline and utility.

Rows of similar utility share a batch, so that a batch which cannot be served in time has little value; tasks mix. The
most urgent rows form small batches, which the schedule may join, and later rows form full ones: the size of the next
batch is thus chosen together with its operating point.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from math import log2

from trimtab_router.scheduling.policies.interface import RESPONSE_MARGIN_SECONDS, SchedulerView
from trimtab_router.scheduling.queue import MAX_SLICES
from trimtab_router.scheduling.stage_request import EscalationRule, RowSlice, Signature

PRIORITY_FACTOR = 30.0
"""Responses of one priority that are worth one of the next higher priority."""
_BatchKey = tuple[Signature, float, str, EscalationRule | None]


@dataclass(slots=True, eq=False)
class CandidateBatch:
    """Rows that are planned as one batch."""

    key: _BatchKey
    """What all batches that may be joined with it have in common."""
    deadline: float
    """Time by which this stage must complete the first slice."""
    level: int
    slices: list[RowSlice] = field(default_factory=list)
    """By deadline; the last may be counted in part."""
    rows: int = 0
    weights: dict[str, float] = field(default_factory=dict)
    """Value of correct responses to all rows, by task."""
    provisional_value: float = 0.0
    """Expected value of the provisional responses."""

    def add(self, row_slice: RowSlice, rows: int, weight: float) -> None:
        """Add this many rows of a slice, each of this value."""
        task = row_slice.request.options.task
        self.slices.append(row_slice)
        self.rows += rows
        self.weights[task] = self.weights.get(task, 0.0) + weight * rows
        if row_slice.provisional_response is not None:
            self.provisional_value += weight * rows * row_slice.provisional_response.accuracy

    def joined(self, other: "CandidateBatch") -> "CandidateBatch":
        weights = {
            task: self.weights.get(task, 0.0) + other.weights.get(task, 0.0)
            for task in {**self.weights, **other.weights}
        }
        slices = [*self.slices, *other.slices]
        return CandidateBatch(
            self.key,
            min(self.deadline, other.deadline),
            self.level,
            slices,
            self.rows + other.rows,
            weights,
            self.provisional_value + other.provisional_value,
        )

    def goes_with(self, other: "CandidateBatch", most_rows: int) -> bool:
        alone = self.slices[0].alone or other.slices[0].alone
        return not alone and self.key == other.key and self.rows + other.rows <= most_rows


def candidate_batches(view: SchedulerView, max_batches: int, *, small_first: bool = True) -> list[CandidateBatch]:
    """Return the first batches of the queue, by the deadline of their first slice.

    Args:
        view: the queue.
        max_batches: bound of the result.
        small_first: whether the first batches are small.
    """
    quarter = max(view.max_batch_rows // 4, 1)
    sizes = (
        (1, quarter, quarter, min(2 * quarter, view.max_batch_rows), view.max_batch_rows)
        if small_first
        else (view.max_batch_rows,)
    )
    batches: list[CandidateBatch] = []
    open_batches: dict[tuple[_BatchKey, int], tuple[CandidateBatch, int]] = {}
    for row_slice in islice(view.waiting, MAX_SLICES):
        work, options = row_slice.request, row_slice.request.options
        weight, level = utility_class(options.utility, options.priority)
        key = (work.signature, work.accuracy_floor, options.task if work.accuracy_floor else "", row_slice.escalation)
        open_batch, capacity = open_batches.get((key, level), (None, 0))
        if open_batch is not None and open_batch.rows + row_slice.rows <= capacity and not row_slice.alone:
            open_batch.add(row_slice, row_slice.rows, weight)
            continue
        deadline = (
            work.due_at
            - view.later_seconds
            - (RESPONSE_MARGIN_SECONDS if row_slice.provisional_response is not None else 0.0)
        )
        for rows in _split_rows(row_slice.rows, view.max_batch_rows):
            if len(batches) == max_batches:
                return batches
            batches.append(CandidateBatch(key, deadline, level))
            batches[-1].add(row_slice, rows, weight)
        if not row_slice.alone:
            open_batches[key, level] = (batches[-1], sizes[min(len(batches), len(sizes)) - 1])
    return batches


@lru_cache(maxsize=1024)
def utility_class(utility: float, priority: int) -> tuple[float, int]:
    """Return the value of a correct row, and its logarithm to base two, rounded."""
    weight = utility * PRIORITY_FACTOR ** (3 - priority)
    return weight, round(log2(max(weight, 1e-9)))


def _split_rows(rows: int, max_batches: int) -> Iterator[int]:
    while rows > 0:
        yield min(rows, max_batches)
        rows -= max_batches
