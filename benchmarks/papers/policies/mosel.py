"""MOSEL as printed (sections 4.3 and 5.2): one subset a job, jobs one by one, and the time budget of the violator.

A baseline, with the known defects of the paper. Each job starts with its most accurate strategy. Along the queue, a job
that would be late is a violator: the strategies of all jobs up to it are chosen anew, so that accuracy times rows is
greatest and all end by the violator's deadline. The deadlines of the jobs before it are not checked again. If no choice
meets the deadline, the violator is skipped until its drop time.
"""

from collections.abc import Callable
from functools import partial
from zlib import crc32

from trimtab_router.scheduling.policies import slack_fit
from trimtab_router.scheduling.policies.deadline_schedule import solve
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, SchedulerView, WaitUntil
from trimtab_router.scheduling.policies.job_groups import JobGroup, JobOptions, group_jobs, job_options
from trimtab_router.scheduling.policies.modality_mix import MAX_GROUPS
from trimtab_router.scheduling.policies.option_cache import OptionCache
from trimtab_router.scheduling.policies.queue_plan import PlannedGroup, dispatch_first_batch
from trimtab_router.scheduling.policies.schedule_table import DROPPED, Job, ProgramStep

CELLS = 256


class PlannedJob:
    """A job and its strategy, at first the most accurate one."""

    def __init__(self, group: JobGroup, choice: JobOptions) -> None:
        self.group = group
        self.choice = choice
        self.option = choice.seconds.size - 1

    @property
    def seconds(self) -> float:
        """Of all its batches."""
        return float(self.choice.seconds[self.option])


def decide(view: SchedulerView) -> Dispatch | WaitUntil:
    return _decide(view, _replan)


def _decide(view: SchedulerView, keep_deadline: Callable[[list[PlannedJob], float], bool]) -> Dispatch | WaitUntil:
    """Plan one job after the other, and skip each whose deadline cannot be kept."""
    start = max(view.now, min(view.free_at(), default=view.now))
    planned_jobs: list[PlannedJob] = []
    for job in jobs_of(view):
        planned_jobs.append(job)
        if not keep_deadline(planned_jobs, start):
            planned_jobs.pop()
    return dispatch_first(view, planned_jobs)


def jobs_of(view: SchedulerView) -> list[PlannedJob]:
    """Return the first jobs with their strategies: all rows at one point."""
    option_cache = OptionCache(view)
    found = (
        (group, job_options(option_cache, group, mixed=False, escalates=False))
        for group in group_jobs(option_cache, MAX_GROUPS)
    )
    return [PlannedJob(group, choice) for group, choice in found if choice is not None]


def dispatch_first(view: SchedulerView, planned_jobs: list[PlannedJob]) -> Dispatch | WaitUntil:
    """Dispatch the first batch of the first job, with rows of no other job."""
    if not planned_jobs:
        return slack_fit.decide(view)
    first = planned_jobs[0]
    step = ProgramStep(row=0, first_job=0, jobs=1, option=first.option)
    return dispatch_first_batch(OptionCache(view).view, [PlannedGroup(first.group, first.choice)], [step], spare=0.0)


def _replan(planned_jobs: list[PlannedJob], start: float) -> bool:
    """Unless the last job is in time, choose strategies that all end by its deadline; False if there are none."""
    until = planned_jobs[-1].group.deadline
    if start + sum(job.seconds for job in planned_jobs) <= until:
        return True
    jobs = [Job(until, job.choice.seconds, job.choice.values, value=1.0) for job in planned_jobs]
    steps = solve(jobs, start, cells=CELLS).steps
    if any(step.option == DROPPED for step in steps):
        return False
    for job, step in zip(planned_jobs, steps, strict=True):
        job.option = step.option
    return True


def decide_aggressive(view: SchedulerView) -> Dispatch | WaitUntil:
    """A baseline: every job at the fastest strategy that reaches its floor, whatever its deadline (section 7.1)."""
    jobs = jobs_of(view)[:1]
    for job in jobs:
        job.option = 0
    return dispatch_first(view, jobs)


def decide_random(view: SchedulerView) -> Dispatch | WaitUntil:
    """The paper's random heuristic (appendix A): jobs before a violator take their fastest strategies in random order.

    The paper draws with replacement and does not end if no choice meets the deadline; here the jobs are shuffled once,
    and a violator that is still late is skipped. The shuffle is a hash of the time, so that equal views give equal
    decisions.
    """
    return _decide(view, partial(_speed_up_at_random, now=view.now))


def _speed_up_at_random(planned_jobs: list[PlannedJob], start: float, now: float) -> bool:
    """Make jobs faster in random order until the last is in time; False if it never is."""
    until = planned_jobs[-1].group.deadline
    spent = start + sum(job.seconds for job in planned_jobs)
    for index in sorted(range(len(planned_jobs)), key=lambda index: crc32(f"{now!r} {index}".encode())):
        job = planned_jobs[index]
        if spent <= until:
            break
        spent -= job.seconds - float(job.choice.seconds[0])
        job.option = 0
    return spent <= until


POLICY = Policy(decide, uses_fallbacks=True)
AGGRESSIVE = Policy(decide_aggressive, uses_fallbacks=True)
RANDOM = Policy(decide_random, uses_fallbacks=True)
