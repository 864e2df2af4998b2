"""A baseline: every job at the fastest strategy that reaches its floor, whatever its deadline (MOSEL, section 7.1)."""

from benchmarks.papers.policies.mosel import dispatch_first, jobs_of
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, SchedulerView, WaitUntil


def decide(view: SchedulerView) -> Dispatch | WaitUntil:
    jobs = jobs_of(view)[:1]
    for job in jobs:
        job.option = 0
    return dispatch_first(view, jobs)


POLICY = Policy(decide, uses_fallbacks=True)
