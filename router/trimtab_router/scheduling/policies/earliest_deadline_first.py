"""The most urgent first, at the plan's own operating point. Pure.

Work-conserving: up to the planned rows leave, most urgent first, but no more than the most urgent of them can afford.
Only when the backlog is more than the replicas can serve in time is an urgent slice that would shrink the batch dropped
instead: else each batch would shrink to save one request and many others would be late for it. Another point than the
planned one serves only those whose accuracy floor is above it.
"""

from trimtab_router.scheduling.policies.drop_order import first_to_drop
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, SchedulerView, WaitUntil, overloaded
from trimtab_router.scheduling.stage_request import RowSlice


def decide(view: SchedulerView) -> Dispatch | WaitUntil:
    """Let the next batch leave."""
    drops_first = first_to_drop(view)
    if drops_first:
        return WaitUntil(view.now, drops_first)
    drops: list[RowSlice] = []
    for head in view.waiting:
        points = view.points_for(head)
        if not points:
            drops.append(head)
            continue
        point = points[0]
        candidates = view.candidates(head, point)
        full = min(view.max_batch_rows, candidates.rows)
        fitting = view.fitting_rows(point, head, full)
        if view.drop_policy == "Predicted" and 0 < fitting < full and overloaded(view, candidates, point):
            drops.append(head)
            continue
        return Dispatch(point, candidates.first(fitting or full), drops)
    return WaitUntil(drops=drops)


POLICY = Policy(decide)
