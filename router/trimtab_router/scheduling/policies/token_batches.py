"""What waits, gathered into batches by deadline and utility. Pure.

Rows of about the same utility go into one batch, so that a batch which cannot be served in time is one of little worth;
tasks mix. The most urgent rows are gathered into small batches, which the schedule may join, those behind into full
ones: so the size of the next batch is chosen together with its operating point.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from math import log2

from trimtab_router.scheduling.policies.interface import RESPONSE_MARGIN_SECONDS, SchedulerView
from trimtab_router.scheduling.queue import MOST_SLICES
from trimtab_router.scheduling.stage_request import EscalationRule, RowSlice, Signature

PRIORITY_FACTOR = 30.0
"""How many answers of one priority are worth one of the next higher."""
_BatchKey = tuple[Signature, float, str, EscalationRule | None]


@dataclass(slots=True, eq=False)
class CandidateBatch:
    """Rows that are planned as one batch."""

    key: _BatchKey
    """What all that go together with it have in common."""
    deadline: float
    """By which this stage must be done with the first."""
    level: int
    slices: list[RowSlice] = field(default_factory=list)
    """Of which it is, most urgent first; of the last maybe not all."""
    rows: int = 0
    """Of all."""
    weights: dict[str, float] = field(default_factory=dict)
    """What right answers to all its rows are worth, by task."""
    provisional_value: float = 0.0
    """What the answers they have are worth, as far as they are expected to be right."""

    def add(self, row_slice: RowSlice, rows: int, weight: float) -> None:
        """So many rows more, each worth that much."""
        task = row_slice.request.options.task
        self.slices.append(row_slice)
        self.rows += rows
        self.weights[task] = self.weights.get(task, 0.0) + weight * rows
        if row_slice.provisional_response is not None:
            self.provisional_value += weight * rows * row_slice.provisional_response.accuracy

    def joined(self, other: "CandidateBatch") -> "CandidateBatch":
        """Both as one."""
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
        """Whether both may be one batch."""
        alone = self.slices[0].alone or other.slices[0].alone
        return not alone and self.key == other.key and self.rows + other.rows <= most_rows


def candidate_batches(view: SchedulerView, max_batches: int, *, small_first: bool = True) -> list[CandidateBatch]:
    """The first batches along the queue, by the deadlines of their first.

    Args:
        view: what waits.
        most: how many.
        small: whether the first are small ones.
    """
    quarter = max(view.max_batch_rows // 4, 1)
    sizes = (
        (1, quarter, quarter, min(2 * quarter, view.max_batch_rows), view.max_batch_rows)
        if small_first
        else (view.max_batch_rows,)
    )
    batches: list[CandidateBatch] = []
    open_batches: dict[tuple[_BatchKey, int], tuple[CandidateBatch, int]] = {}
    for row_slice in islice(view.waiting, MOST_SLICES):
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
    """What a right answer is worth, and the power of two nearest to that."""
    weight = utility * PRIORITY_FACTOR ** (3 - priority)
    return weight, round(log2(max(weight, 1e-9)))


def _split_rows(rows: int, max_batches: int) -> Iterator[int]:
    while rows > 0:
        yield min(rows, max_batches)
        rows -= max_batches
