"""The most urgent first, always at the most accurate point: what does not know of modalities (MOSEL's none). Pure.

A baseline, with all that batches of several requests can give it.
"""

from dataclasses import replace

from trimtab_router.scheduling.policies import earliest_deadline_first
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, SchedulerView, WaitUntil


def decide(view: SchedulerView) -> Dispatch | WaitUntil:
    """Let the next batch leave."""
    best = max(view.points, key=lambda point: point.accuracy)
    return earliest_deadline_first.decide(replace(view, points=(best,)))


POLICY = Policy(decide, uses_fallbacks=True)
