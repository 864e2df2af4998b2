"""Candidate batches: the queue grouped by deadline and utility.

Rows of similar utility share a batch, so that a batch which cannot be served in time has little value; tasks mix. The
most urgent rows form small batches, which the schedule may join, and later rows form full ones: the size of the next
batch is thus chosen together with its operating point.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from math import log2

from trimtab_router.scheduling.policies.interface import SchedulerView
from trimtab_router.scheduling.policies.queue_plan import RowGroup, group_rows, growing_sizes, priority_utility
from trimtab_router.scheduling.queue import MAX_SLICES
from trimtab_router.scheduling.stage_request import RowSlice


@dataclass(slots=True, eq=False)
class CandidateBatch(RowGroup):
    """Rows that are planned as one batch."""

    weights: dict[str, float] = field(default_factory=dict)  # value of correct responses to all rows, by task
    provisional_value: float = 0.0  # expected value of the provisional responses

    @property
    def level(self) -> int:
        options = self.head.request.options
        return utility_class(options.utility, options.priority)[1]

    def add(self, row_slice: RowSlice, rows: int) -> None:
        options = row_slice.request.options
        self.slices.append(row_slice)
        self.rows += rows
        value = utility_class(options.utility, options.priority)[0] * rows
        self.weights[options.task] = self.weights.get(options.task, 0.0) + value
        if row_slice.provisional_response is not None:
            self.provisional_value += value * row_slice.provisional_response.accuracy

    def goes_with(self, other: "CandidateBatch", max_batch_rows: int) -> bool:  # noqa: ARG002 - any size may be joined
        alone = self.head.alone or other.head.alone
        return not alone and _joining_key(self.head) == _joining_key(other.head)

    def joined(self, other: "CandidateBatch") -> "CandidateBatch":
        return CandidateBatch(
            min(self.deadline, other.deadline),
            [*self.slices, *other.slices],
            self.rows + other.rows,
            {
                task: self.weights.get(task, 0.0) + other.weights.get(task, 0.0)
                for task in {**self.weights, **other.weights}
            },
            self.provisional_value + other.provisional_value,
        )


def candidate_batches(view: SchedulerView, max_batches: int, *, small_first: bool = True) -> list[CandidateBatch]:
    """Return the first batches by the deadline of their first slice. `small_first`: whether the first are small."""
    return group_rows(
        view,
        CandidateBatch,
        _grouping_key,
        max_groups=max_batches,
        max_rows=view.max_batch_rows,
        max_slices=MAX_SLICES,
        sizes=growing_sizes(view.max_batch_rows) if small_first else (view.max_batch_rows,),
    )


def _grouping_key(row_slice: RowSlice) -> Hashable | None:
    """Return what grouped slices have in common; None for a slice that runs alone."""
    if row_slice.alone:
        return None
    options = row_slice.request.options
    return _joining_key(row_slice), utility_class(options.utility, options.priority)[1]


def _joining_key(row_slice: RowSlice) -> Hashable:
    """Return what batches that may be joined have in common: floors and escalations, but not utility."""
    request = row_slice.request
    floor = request.accuracy_floor
    return request.signature, floor, request.options.task if floor else "", row_slice.escalation


@lru_cache(maxsize=1024)
def utility_class(utility: float, priority: int) -> tuple[float, int]:
    weight = priority_utility(utility, priority)
    return weight, round(log2(max(weight, 1e-9)))
