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

Worth = tuple[int, float]
"""Greater is worth more."""
_NOTHING: Worth = (-1_000_000, 0.0)


def utility_per_second(work: StageRequest, row_seconds: float = 1.0) -> Worth:
    """What a second spent on a work is worth.

    Args:
        work: the work.
        row_seconds: of one of its rows, at the fastest point that may serve it.
    """
    return -work.wish.priority, work.wish.utility / (work.rows * max(row_seconds, 1e-9))


def rows_ahead_of(work: StageRequest, waiting: Iterable[RowSlice]) -> int:
    """How many of the rows that are due no later than a work would not be dropped for it.

    Args:
        work: the work.
        waiting: most urgent first.
    """
    due = takewhile(lambda piece: piece.work.due_at <= work.due_at, waiting)
    worth = utility_per_second(work)
    return sum(piece.rows for piece in due if piece.provisional is None and utility_per_second(piece.work) >= worth)


def first_to_drop(view: SchedulerView) -> list[RowSlice]:
    """Who must go so that the others can be served in time; none where all are worth the same.

    In the order of deadlines, whenever the rows so far cannot all be served in time by full batches at the fastest
    points that may serve them, the least valuable of them goes (as Moore and Hodgson drop the longest). A slice whose
    rows have a provisional answer goes before all others, since nobody loses by it.
    """
    if not view.waiting.special_rows or view.drop_policy != "Predicted":
        return []
    begin, most = view.now + view.later_seconds, _NOTHING
    busy_seconds, gone = 0.0, []
    heap: list[tuple[Worth, int, RowSlice, float]] = []
    for place, piece in enumerate(islice(view.waiting, MOST_SLICES)):
        row_seconds = _row_seconds(view, piece)
        seconds = piece.rows * row_seconds
        busy_seconds += seconds
        worth = utility_per_second(piece.work, row_seconds) if piece.provisional is None else _NOTHING
        most = max(most, worth)
        heappush(heap, (worth, -place, piece, seconds))
        while heap[0][0] < most and begin + busy_seconds > piece.work.due_at:
            *_, least, freed = heappop(heap)
            busy_seconds -= freed
            gone.append(least)
    return gone


def _row_seconds(view: SchedulerView, piece: RowSlice) -> float:
    """Seconds of one row in full batches of all replicas, at the fastest point that may serve it."""
    points = view.points_for(piece)
    return least_seconds(points, view.most_rows) / view.most_rows / max(view.replicas, 1) if points else 0.0
