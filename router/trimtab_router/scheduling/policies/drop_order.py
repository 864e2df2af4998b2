"""Drop order in overload: the lowest priority first, and within a priority the least utility per second.

Rows are dispatched by deadline alone. A priority has no effect while every row can be served in time; it decides which
rows are dropped if some must be. A patient request of high priority therefore never delays an urgent one without need.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import islice, takewhile

from trimtab_router.scheduling.policies.interface import SchedulerView, least_seconds
from trimtab_router.scheduling.queue import MAX_SLICES
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest

DropRank = tuple[int, float]  # a greater rank is dropped later
_LOWEST: DropRank = (-1_000_000, 0.0)


def drop_rank(request: StageRequest, row_seconds: float = 1.0) -> DropRank:
    """Return a request's priority, then its utility per second; `row_seconds` at the fastest suitable point."""
    return -request.options.priority, request.options.utility / (request.rows * max(row_seconds, 1e-9))


def rows_ahead_of(request: StageRequest, waiting: Iterable[RowSlice]) -> int:
    """Count the rows due no later than a request that are not dropped before it."""
    due = takewhile(lambda row_slice: row_slice.request.due_at <= request.due_at, waiting)
    rank = drop_rank(request)
    return sum(
        row_slice.rows
        for row_slice in due
        if row_slice.provisional_response is None and drop_rank(row_slice.request) >= rank
    )


def first_to_drop(view: SchedulerView) -> list[RowSlice]:
    """Return the slices to drop so that all others can be served in time; none if all have the same rank.

    In the order of deadlines, if full batches would miss one, the slice of the lowest rank goes (as Moore and Hodgson
    drop the longest job). A slice with a provisional response goes first, because its request keeps that response.
    """
    if not view.waiting.special_rows or view.drop_policy != "Predicted":
        return []
    begin, highest = view.now + view.later_seconds, _LOWEST
    busy_seconds, dropped = 0.0, []
    heap: list[tuple[DropRank, int, RowSlice, float]] = []
    for index, row_slice in enumerate(islice(view.waiting, MAX_SLICES)):
        row_seconds = _row_seconds(view, row_slice)
        seconds = row_slice.rows * row_seconds
        busy_seconds += seconds
        rank = drop_rank(row_slice.request, row_seconds) if row_slice.provisional_response is None else _LOWEST
        highest = max(highest, rank)
        heappush(heap, (rank, -index, row_slice, seconds))
        while heap[0][0] < highest and begin + busy_seconds > row_slice.request.due_at:
            *_, lowest, freed_seconds = heappop(heap)
            busy_seconds -= freed_seconds
            dropped.append(lowest)
    return dropped


def _row_seconds(view: SchedulerView, row_slice: RowSlice) -> float:
    points = view.points_for(row_slice)
    return (
        least_seconds(points, view.max_batch_rows) / view.max_batch_rows / max(view.ready_replicas, 1)
        if points
        else 0.0
    )
