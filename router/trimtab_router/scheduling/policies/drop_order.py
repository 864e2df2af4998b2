"""Who is dropped first in overload: the lowest priority, and of one priority the least utility a second. Pure.

Deadlines alone order who leaves. A priority changes nothing as long as everybody can be served in time; it decides who
is not served when not all can be. So a patient request of high priority never makes an urgent one late without need,
and nobody waits for ever behind others.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import islice, takewhile

from trimtab_router.scheduling.policies.interface import SchedulerView, least_seconds
from trimtab_router.scheduling.queue import MOST_SLICES
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest

DropRank = tuple[int, float]
"""Greater is worth more."""
_LOWEST: DropRank = (-1_000_000, 0.0)


def drop_rank(work: StageRequest, row_seconds: float = 1.0) -> DropRank:
    """What a second spent on a work is worth.

    Args:
        work: the work.
        row_seconds: of one of its rows, at the fastest point that may serve it.
    """
    return -work.options.priority, work.options.utility / (work.rows * max(row_seconds, 1e-9))


def rows_ahead_of(work: StageRequest, waiting: Iterable[RowSlice]) -> int:
    """How many of the rows that are due no later than a work would not be dropped for it.

    Args:
        work: the work.
        waiting: most urgent first.
    """
    due = takewhile(lambda row_slice: row_slice.request.due_at <= work.due_at, waiting)
    rank = drop_rank(work)
    return sum(
        row_slice.rows
        for row_slice in due
        if row_slice.provisional_response is None and drop_rank(row_slice.request) >= rank
    )


def first_to_drop(view: SchedulerView) -> list[RowSlice]:
    """Who must go so that the others can be served in time; none where all are worth the same.

    In the order of deadlines, whenever the rows so far cannot all be served in time by full batches at the fastest
    points that may serve them, the least valuable of them goes (as Moore and Hodgson drop the longest). A slice whose
    rows have a provisional answer goes before all others, since nobody loses by it.
    """
    if not view.waiting.special_rows or view.drop_policy != "Predicted":
        return []
    begin, highest = view.now + view.later_seconds, _LOWEST
    busy_seconds, dropped = 0.0, []
    heap: list[tuple[DropRank, int, RowSlice, float]] = []
    for index, row_slice in enumerate(islice(view.waiting, MOST_SLICES)):
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
    """Seconds of one row in full batches of all replicas, at the fastest point that may serve it."""
    points = view.points_for(row_slice)
    return (
        least_seconds(points, view.max_batch_rows) / view.max_batch_rows / max(view.ready_replicas, 1)
        if points
        else 0.0
    )
