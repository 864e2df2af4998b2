"""`EarliestDeadlineFirst`: the most urgent rows first, at the planned operating point.

The policy is work-conserving: a batch has up to the planned rows, but no more than the deadline of its most urgent row
allows. In overload, an urgent slice that would shrink the batch is dropped instead, because small batches would make
many later rows late. Another point than the planned one serves only rows whose accuracy floor exceeds it.
"""

from trimtab_router.scheduling.policies.interface import (
    Dispatch,
    Policy,
    SchedulerView,
    WaitUntil,
    first_to_drop,
    overloaded,
)
from trimtab_router.scheduling.stage_request import RowSlice


def decide(view: SchedulerView) -> Dispatch | WaitUntil:
    sole = view.waiting.sole()
    if sole is not None and sole.rows == 1 and (points := view.points_for(sole)):  # the common case
        return Dispatch(points[0], [sole])
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
