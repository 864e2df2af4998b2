"""A baseline without modality selection: the most urgent rows first, always at the most accurate point."""

from dataclasses import replace

from trimtab_router.scheduling.policies import earliest_deadline_first
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, SchedulerView, WaitUntil


def decide(view: SchedulerView) -> Dispatch | WaitUntil:
    best = max(view.points, key=lambda point: point.accuracy)
    return earliest_deadline_first.decide(replace(view, points=(best,)))


POLICY = Policy(decide, uses_fallbacks=True)
