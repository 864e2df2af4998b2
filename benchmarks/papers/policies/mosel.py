"""MOSEL as printed (4.3 and 5.2): one subset a job, jobs one by one, and the time budget of the violator. Pure.

A baseline, with what is known to be wrong with it. Each job begins at its most accurate strategy. Along the queue,
whoever would be late is a violator: for all up to it strategies are chosen anew, so that accuracy times rows is
greatest and all of them together end by the violator's deadline. Those before it have deadlines of their own, which
nobody looks at again. Where nothing makes it, the violator is passed over, until its time has come.
"""

from trimtab_router.scheduling.policies import slack_fit
from trimtab_router.scheduling.policies.deadline_schedule import DROPPED, Job, solve
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, SchedulerView, WaitUntil
from trimtab_router.scheduling.policies.job_groups import (
    JobGroup,
    JobOptions,
    dispatch_first_batch,
    group_jobs,
    job_options,
)
from trimtab_router.scheduling.policies.modality_mix import MAX_GROUPS
from trimtab_router.scheduling.policies.option_cache import OptionCache

CELLS = 256


class Kept:
    """A job that is not dropped, and its strategy: at first the most accurate."""

    def __init__(self, unit: JobGroup, choice: JobOptions) -> None:
        self.unit = unit
        self.choice = choice
        self.option = choice.seconds.size - 1

    @property
    def seconds(self) -> float:
        """Of all its batches."""
        return float(self.choice.seconds[self.option])


def decide(view: SchedulerView) -> Dispatch | WaitUntil:
    """Let the first batch of the most urgent job leave."""
    start = max(view.now, min(view.free_at(), default=view.now))
    kept: list[Kept] = []
    for job in jobs_of(view):
        kept.append(job)
        if start + sum(each.seconds for each in kept) > job.unit.deadline and not _replanned(kept, start):
            kept.pop()
    return leave(view, kept)


def jobs_of(view: SchedulerView) -> list[Kept]:
    """The first jobs, each with its strategies: all its rows at one point."""
    menu = OptionCache(view)
    found = ((unit, job_options(menu, unit, mixed=False, escalates=False)) for unit in group_jobs(menu, MAX_GROUPS))
    return [Kept(unit, choice) for unit, choice in found if choice is not None]


def leave(view: SchedulerView, kept: list[Kept]) -> Dispatch | WaitUntil:
    """Let the first batch of the first job leave, with rows of no other."""
    if not kept:
        return slack_fit.decide(view)
    line, rows = kept[0].choice.serving_options(kept[0].option)[0]
    return dispatch_first_batch(OptionCache(view), kept[0].unit, line, rows)


def _replanned(kept: list[Kept], start: float) -> bool:
    """Choose strategies for all of them that end together by the deadline of the last; False where none do."""
    until = kept[-1].unit.deadline
    jobs = [Job(until, each.choice.seconds, each.choice.values, value=1.0) for each in kept]
    steps = solve(jobs, start, cells=CELLS).steps
    if any(step.option == DROPPED for step in steps):
        return False
    for each, step in zip(kept, steps, strict=True):
        each.option = step.option
    return True


POLICY = Policy(decide, uses_fallbacks=True)
