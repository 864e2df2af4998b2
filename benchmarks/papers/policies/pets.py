"""PetS's shared batches: whoever came first, all tasks in one batch, always at the planned point. Pure.

A baseline. PetS splits queries of a task into batches of like lengths and joins those of several tasks, by tables of
what each length costs. Images are all of one length, so that nothing of this is left but full batches in the order of
arrival. It knows neither deadlines nor utilities.
"""

from trimtab_router.scheduling.policies.interface import Dispatch, Point, Policy, SchedulerView, WaitUntil
from trimtab_router.scheduling.policies.job_groups import first_rows
from trimtab_router.scheduling.stage_request import RowSlice


def decide(view: SchedulerView) -> Dispatch | WaitUntil:
    """Let those who came first leave."""
    return in_turn(view, view.points[0])


def in_turn(view: SchedulerView, point: Point) -> Dispatch | WaitUntil:
    """Those who came first, and all who may go with them, at a point."""
    waiting = sorted(view.waiting, key=_arrival)
    if not waiting:
        return WaitUntil()
    signature = waiting[0].request.signature
    alike = [piece for piece in waiting[1:] if piece.request.signature == signature and not piece.alone]
    alike = [] if waiting[0].alone else alike
    return Dispatch(point, first_rows([waiting[0], *alike], view.max_batch_rows))


def _arrival(piece: RowSlice) -> float:
    return piece.request.enqueued_at


POLICY = Policy(decide, uses_fallbacks=True)
