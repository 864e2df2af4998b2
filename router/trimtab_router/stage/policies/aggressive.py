"""Every job at the fastest strategy that meets its floor, whatever its deadline (MOSEL, section 7.1). Pure.

A baseline.
"""

from trimtab_router.stage.policies.mosel import jobs_of, leave
from trimtab_router.stage.policies.view import Departure, NotBefore, Policy, View


def decide(view: View) -> Departure | NotBefore:
    """Let the first batch of the most urgent job leave."""
    jobs = jobs_of(view)[:1]
    for job in jobs:
        job.option = 0
    return leave(view, jobs)


POLICY = Policy(decide, falls_back=True)
