"""Every job at the fastest strategy that meets its floor, whatever its deadline (MOSEL, section 7.1). Pure.

A baseline.
"""

from trimtab_router.scheduling.policies.interface import Dispatch, Policy, SchedulerView, WaitUntil
from trimtab_router.scheduling.policies.mosel import jobs_of, leave


def decide(view: SchedulerView) -> Dispatch | WaitUntil:
    """Let the first batch of the most urgent job leave."""
    jobs = jobs_of(view)[:1]
    for job in jobs:
        job.option = 0
    return leave(view, jobs)


POLICY = Policy(decide, falls_back=True)
