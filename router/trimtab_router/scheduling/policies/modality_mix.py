"""`ModalityMix`: plans the whole queue as one schedule and dispatches the first batch of the plan.

Jobs are in the order of their deadlines, each with its exact splits over points and batches (`split_table`). The
schedule serves as many jobs as possible in time, and then as many rows correctly as possible. A job is given up only
if not even the fastest splits meet all deadlines: the least valuable one, which stays queued until its drop time.
Small jobs are grouped: the most urgent into a batch of the size that pays, later ones into full batches. A shadow
price reserves time for later arrivals. Rows with a provisional response yield to rows without one.
"""

from dataclasses import replace

import numpy as np

from trimtab_router.scheduling.policies import slack_fit
from trimtab_router.scheduling.policies.deadline_schedule import load_factor, solve
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, SchedulerView, WaitUntil, least_seconds
from trimtab_router.scheduling.policies.job_groups import JobGroup, JobOptions, group_jobs, job_options
from trimtab_router.scheduling.policies.option_cache import OptionCache, precompute_tables
from trimtab_router.scheduling.policies.queue_plan import (
    PlannedGroup,
    dispatch_first_batch,
    growing_sizes,
    joined_groups,
    of_free_replica,
    spare_seconds,
)
from trimtab_router.scheduling.policies.schedule_table import DROPPED, ProgramStep
from trimtab_router.scheduling.stage_request import RowSlice

MAX_GROUPS = 20  # planning horizon in groups
ESCALATION_FILL_SHARE = 0.5  # of the slowest full batch's seconds, while escalated rows wait for others


_PlannedJobs = list[PlannedGroup[JobGroup]]


def decide(view: SchedulerView, *, splits: bool = True) -> Dispatch | WaitUntil:
    """Dispatch the first batch of the plan. `splits`: whether rows of one job may run at several points."""
    start = max(view.now, min(view.free_at(), default=view.now))
    option_cache = OptionCache(view)
    view = option_cache.view
    planned, unreachable = _plan_groups(option_cache, start, splits=splits)
    planned = of_free_replica(view, planned)
    if not planned:
        return WaitUntil(view.now, unreachable) if unreachable else slack_fit.decide(view)
    _add_joined(option_cache, planned)
    given_seconds = view.given_seconds(planned[0].group.head)
    least_seconds_total = sum(float(entry.options.seconds[0]) for entry in planned)
    jobs = [entry.job(entry.group.value) for entry in planned]
    schedule = solve(jobs, start, price=view.shadow_price() * load_factor(least_seconds_total, given_seconds))
    steps = [step for step in schedule.steps if step.option != DROPPED]
    if not steps or (view.drop_policy != "Predicted" and schedule.steps[0].option == DROPPED):
        return slack_fit.decide(view)
    ordered, spare = _order_steps(view, planned, steps, start)
    return replace(dispatch_first_batch(view, planned, ordered, spare), drops=unreachable)


def _order_steps(
    view: SchedulerView, planned: _PlannedJobs, steps: list[ProgramStep], start: float
) -> tuple[list[ProgramStep], float]:
    """Order the steps by deadline, and return by how many seconds all may be delayed; negative if one is missed.

    Escalations in front let the first group without a response go before them while none becomes late.
    """
    first_unanswered = next(
        (index for index, step in enumerate(steps) if not planned[step.first_job].group.provisional_correct), 0
    )
    if first_unanswered:
        escalations, rest = [steps[first_unanswered], *steps[:first_unanswered]], steps[first_unanswered + 1 :]
        end, spare = spare_seconds(planned, escalations, start)
        spare -= ESCALATION_FILL_SHARE * max(point.seconds(view.max_batch_rows) for point in view.points)
        if spare >= 0:
            return [*escalations, *rest], min(spare, spare_seconds(planned, rest, end)[1])
    return steps, spare_seconds(planned, steps, start)[1]


def _plan_groups(option_cache: OptionCache, start: float, *, splits: bool) -> tuple[_PlannedJobs, list[RowSlice]]:
    """Return the first groups that can be served in time, and the slices that no option can save."""
    view = option_cache.view
    planned: _PlannedJobs = []
    unreachable: dict[int, RowSlice] = {}  # a large job has several groups
    for group in group_jobs(option_cache, 2 * MAX_GROUPS, growing_sizes(view.max_batch_rows)):
        alone = len(group.slices) == 1
        options = job_options(option_cache, group, mixed=splits and alone)
        if options is None:
            continue
        if view.drop_policy == "Predicted" and start + options.seconds[0] > group.deadline and alone:
            unreachable[id(group.head)] = group.head
        elif len(planned) < MAX_GROUPS:
            planned.append(PlannedGroup(group, options))
    return [entry for entry in planned if id(entry.group.head) not in unreachable], list(unreachable.values())


def _add_joined(option_cache: OptionCache, planned: _PlannedJobs) -> None:
    view = option_cache.view
    for group, count in joined_groups(planned, view.max_batch_rows):
        options = job_options(option_cache, group, mixed=False)
        if options is not None:
            options = _leave_time_for_newcomers(view, group, options)
            planned[0].joined.append(PlannedGroup(group, options, count))


def _leave_time_for_newcomers(view: SchedulerView, group: JobGroup, options: JobOptions) -> JobOptions:
    """Remove options so long that a new request with the same slack as the most urgent row would be late."""
    max_seconds = view.given_seconds(group.head) - least_seconds(view.points, view.max_batch_rows)
    indices = np.flatnonzero(options.seconds <= max_seconds)
    if not indices.size or view.drop_policy == "Never":
        indices = np.arange(1)
    return options.select(indices)


POLICY = Policy(decide, uses_fallbacks=True, mixes_points=True, prepare=precompute_tables)
