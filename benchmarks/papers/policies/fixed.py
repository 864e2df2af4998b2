"""Every batch at one given point: the most urgent first, the least valuable dropped. Pure.

A baseline: what merging or prompting by a fixed number gives at its best.
"""

from dataclasses import replace
from functools import partial

from trimtab_router.scheduling.policies import earliest_deadline_first
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, SchedulerView, WaitUntil


def decide(view: SchedulerView, *, point: str) -> Dispatch | WaitUntil:
    """Let the next batch leave at the point of that name."""
    return earliest_deadline_first.decide(replace(view, points=[each for each in view.points if each.name == point]))


def fixed(point: str) -> Policy:
    """The policy that knows this point alone."""
    return Policy(partial(decide, point=point), uses_fallbacks=True)
