"""Every batch at one given point, most urgent rows first, least valuable rows dropped.

A baseline: merging or prompting by a fixed number at its best.
"""

from dataclasses import replace
from functools import partial

from trimtab_router.scheduling.policies import earliest_deadline_first
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, SchedulerView, WaitUntil


def decide(view: SchedulerView, *, point: str) -> Dispatch | WaitUntil:
    return earliest_deadline_first.decide(replace(view, points=[job for job in view.points if job.name == point]))


def fixed(point: str) -> Policy:
    """Return the policy that uses this point alone."""
    return Policy(partial(decide, point=point), uses_fallbacks=True)
