"""MOSEL's random heuristic (appendix A): jobs before a violator take their fastest strategies in random order.

A baseline. The paper draws with replacement and does not end if no choice meets the deadline; here the jobs are
shuffled once, and a violator that is still late is skipped. The shuffle is a hash of the time, so that equal views give
equal decisions.
"""

from zlib import crc32

from benchmarks.papers.policies.mosel import PlannedJob, dispatch_first, jobs_of
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, SchedulerView, WaitUntil


def decide(view: SchedulerView) -> Dispatch | WaitUntil:
    start = max(view.now, min(view.free_at(), default=view.now))
    planned_jobs: list[PlannedJob] = []
    for job in jobs_of(view):
        planned_jobs.append(job)
        if not _made(planned_jobs, start, view.now):
            planned_jobs.pop()
    return dispatch_first(view, planned_jobs)


def _made(planned_jobs: list[PlannedJob], start: float, now: float) -> bool:
    """Make jobs faster in random order until the last is in time; False if it never is."""
    until = planned_jobs[-1].group.deadline
    spent = start + sum(job.seconds for job in planned_jobs)
    places = range(len(planned_jobs))
    for place in sorted(places, key=lambda place: crc32(f"{now!r} {place}".encode())):
        job = planned_jobs[place]
        if spent <= until:
            break
        spent -= job.seconds - float(job.choice.seconds[0])
        job.option = 0
    return spent <= until


POLICY = Policy(decide, uses_fallbacks=True)
