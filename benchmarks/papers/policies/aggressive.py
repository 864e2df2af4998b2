"""Every job at the fastest strategy that meets its floor, whatever its deadline (MOSEL, section 7.1). Pure.

A baseline.
"""

from benchmarks.papers.policies.mosel import jobs_of, leave
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, SchedulerView, WaitUntil


def decide(view: SchedulerView) -> Dispatch | WaitUntil:
    """Let the first batch of the most urgent job leave."""
    jobs = jobs_of(view)[:1]
    for job in jobs:
        job.option = 0
    return leave(view, jobs)


POLICY = Policy(decide, uses_fallbacks=True)
