"""PetS's shared batches: order of arrival, mixed tasks, always at the planned point.

A baseline. PetS splits the queries of a task into batches of similar lengths and joins those of several tasks by tables
of costs. All images have one length, so only full batches in order of arrival remain. PetS uses neither deadlines nor
utilities.
"""

from trimtab_router.scheduling.policies.interface import Dispatch, Point, Policy, SchedulerView, WaitUntil
from trimtab_router.scheduling.policies.queue_plan import first_rows
from trimtab_router.scheduling.stage_request import RowSlice


def decide(view: SchedulerView) -> Dispatch | WaitUntil:
    return in_turn(view, view.points[0])


def in_turn(view: SchedulerView, point: Point) -> Dispatch | WaitUntil:
    """Dispatch the first arrivals, and all that may share their batch, at a point."""
    waiting = sorted(view.waiting, key=_arrival)
    if not waiting:
        return WaitUntil()
    signature = waiting[0].request.signature
    alike = [row_slice for row_slice in waiting[1:] if row_slice.request.signature == signature and not row_slice.alone]
    alike = [] if waiting[0].alone else alike
    return Dispatch(point, first_rows([waiting[0], *alike], view.max_batch_rows))


def _arrival(row_slice: RowSlice) -> float:
    return row_slice.request.enqueued_at


POLICY = Policy(decide, uses_fallbacks=True)
