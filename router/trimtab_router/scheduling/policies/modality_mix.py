"""All that waits is planned together, and what the plan gives the most urgent leaves. Pure.

Jobs stand in the order of their deadlines, each with its exact splits over points and batches (`book`); the schedule
chooses among them so that as many answers as can be are in time, and then as many as can be are right. So accuracy
rises by itself when little waits, and a job is given up only if even the fastest splits cannot make all of them: the
least worthy one, which still stays in the queue until its time has come. Small jobs go together: the most urgent ones
as a batch of the size that pays, those behind them as full ones.

On several replicas each job is planned on the one that would end it first; the one that is free now gets what is its
own. A price of time holds back for those who are yet to come. A second look at the least certain rows is a way like
any other; who waits for one has an answer already, and gives way to all who have none.
"""

from dataclasses import dataclass, replace
from math import inf

import numpy as np

from trimtab_router.scheduling.policies import slack_fit
from trimtab_router.scheduling.policies.deadline_schedule import (
    DROPPED,
    Job,
    JointOption,
    ProgramStep,
    assign_to_servers,
    load_factor,
    solve,
)
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, SchedulerView, WaitUntil, least_seconds
from trimtab_router.scheduling.policies.job_groups import (
    SMALL_SHARE,
    JobGroup,
    JobOptions,
    can_share_batch,
    dispatch_first_batch,
    group_jobs,
    job_options,
)
from trimtab_router.scheduling.policies.option_cache import OptionCache, precompute_tables
from trimtab_router.scheduling.policies.split_table import ServingOption
from trimtab_router.scheduling.stage_request import RowSlice, Signature

MAX_GROUPS = 20
"""How far it plans: batches, or large jobs."""
ESCALATION_FILL_SHARE = 0.5
"""Of the seconds of the slowest full batch: what second looks keep for a batch of their own while they wait for others
to fill it."""


@dataclass(frozen=True, slots=True)
class _PlannedGroup:
    """A unit, what it may choose among, and the first few units as one with what these may choose among."""

    group: JobGroup
    options: JobOptions
    joint: tuple[tuple[int, JobGroup, JobOptions], ...] = ()

    def job(self, *, last: bool) -> Job:
        """As the options knows it; `last`: nobody stands behind it."""
        groups = () if last else self.joint
        return Job(
            self.group.deadline,
            self.options.seconds,
            self.options.values,
            self.group.value,
            [JointOption(count, options.seconds, options.values, options.first_share) for count, _, options in groups],
            self.options.first_share,
        )

    def chosen(self, step: ProgramStep) -> tuple[JobGroup, JobOptions]:
        """Whom a step serves, and of what."""
        for count, group, options in self.joint:
            if count == step.jobs:
                return group, options
        return self.group, self.options


def decide(view: SchedulerView, *, splits: bool = True) -> Dispatch | WaitUntil:
    """Let the next batch leave.

    Args:
        view: what waits.
        splits: whether the rows of one job may go in several ways; else each job goes in one.
    """
    start = max(view.now, min(view.free_at(), default=view.now))
    option_cache = OptionCache(view)
    view = option_cache.view
    planned, unreachable = _plan_groups(option_cache, start, splits=splits)
    planned = _for_free_replica(view, planned)
    if not planned:
        return WaitUntil(view.now, unreachable) if unreachable else slack_fit.decide(view)
    planned[0] = _with_joint_options(option_cache, planned)
    jobs = [entry.job(last=len(planned) == 1) for entry in planned]
    head = planned[0].group.head.request
    given_seconds = head.deadline - head.enqueued_at - view.later_seconds
    least_seconds_total = sum(float(entry.options.seconds[0]) for entry in planned)
    schedule = solve(jobs, start, price=view.shadow_price * load_factor(least_seconds_total, given_seconds))
    steps = [step for step in schedule.steps if step.option != DROPPED]
    if not steps or (view.drop_policy != "Predicted" and schedule.steps[0].option == DROPPED):
        return slack_fit.decide(view)
    ordered, spare_seconds = _order_steps(view, planned, steps, start)
    group, options = planned[ordered[0].first_job].chosen(ordered[0])
    serving_option, rows = options.serving_options(ordered[0].option)[0]
    extra_slices = _extra_slices(
        option_cache, group, serving_option, [(planned[entry.first_job], entry) for entry in ordered[1:]]
    )
    dispatch = dispatch_first_batch(option_cache, group, serving_option, rows, extra_slices, spare_seconds)
    return replace(dispatch, drops=unreachable)


def _order_steps(
    view: SchedulerView, planned: list[_PlannedGroup], steps: list[ProgramStep], start: float
) -> tuple[list[ProgramStep], float]:
    """Who is served when, and how much later than planned all could be; negative where anybody would be late.

    By deadline, but second looks wait for company: those in front let the first who has no answer go before them while
    that makes none of them late, in whatever batch they then leave.
    """
    first_unanswered = next(
        (index for index, step in enumerate(steps) if not planned[step.first_job].group.provisional_accuracy), 0
    )
    if first_unanswered:
        escalations, rest = [steps[first_unanswered], *steps[:first_unanswered]], steps[first_unanswered + 1 :]
        end, spare = _spare_seconds(planned, escalations, start)
        spare -= ESCALATION_FILL_SHARE * max(point.seconds(view.max_batch_rows) for point in view.points)
        if spare >= 0:
            return [*escalations, *rest], min(spare, _spare_seconds(planned, rest, end)[1])
    return steps, _spare_seconds(planned, steps, start)[1]


def _plan_groups(
    option_cache: OptionCache, start: float, *, splits: bool
) -> tuple[list[_PlannedGroup], list[RowSlice]]:
    """The first units of the queue that can be served, and who can not even by the fastest ways to their floors."""
    view = option_cache.view
    quarter = max(view.max_batch_rows // SMALL_SHARE, 1)
    sizes = (1, quarter, quarter, 2 * quarter, view.max_batch_rows)
    planned: list[_PlannedGroup] = []
    unreachable: list[RowSlice] = []
    for group in group_jobs(option_cache, 2 * MAX_GROUPS, sizes):
        options = job_options(option_cache, group, mixed=splits and len(group.slices) == 1)
        if options is None:
            continue
        if view.drop_policy == "Predicted" and start + options.seconds[0] > group.deadline and len(group.slices) == 1:
            unreachable += group.slices
        elif len(planned) < MAX_GROUPS:
            planned.append(_PlannedGroup(group, options))
    dropped = set(map(id, unreachable))  # a large job has several units
    return [entry for entry in planned if id(entry.group.head) not in dropped], list(
        {id(p): p for p in unreachable}.values()
    )


def _for_free_replica(view: SchedulerView, planned: list[_PlannedGroup]) -> list[_PlannedGroup]:
    """Those that the replica which is free now would end first."""
    free_at = view.free_at()
    if len(free_at) < 2 or not planned:
        return planned
    shares = assign_to_servers([entry.job(last=True) for entry in planned], free_at)
    return [planned[index] for index in shares[0]]


def _with_joint_options(option_cache: OptionCache, planned: list[_PlannedGroup]) -> _PlannedGroup:
    """The most urgent, which may also leave as one batch with those behind it, as far as they are of its kind."""
    view, first, groups = option_cache.view, planned[0], []
    joint = JobGroup([], 0, inf)
    for count, entry in enumerate(planned, 1):
        if not _can_join(first.group, entry.group, view) or joint.rows + entry.group.rows > view.max_batch_rows:
            break
        for row_slice in entry.group.slices:
            joint.add(row_slice, row_slice.rows, entry.group.deadline)
        if count > 1:
            joined = JobGroup([*joint.slices], joint.rows, joint.deadline)
            joined.floor, joined.weight, joined.provisional_accuracy = (
                joint.floor,
                joint.weight,
                joint.provisional_accuracy,
            )
            options = job_options(option_cache, joined, mixed=False)
            if options is not None:
                groups.append((count, joined, _leave_time_for_newcomers(view, joined, options)))
    return _PlannedGroup(first.group, first.options, tuple(groups))


def _can_join(first: JobGroup, second: JobGroup, view: SchedulerView) -> bool:
    row_slice, head = second.head, first.head
    small = SMALL_SHARE * row_slice.rows <= view.max_batch_rows and not row_slice.alone and not head.alone
    alike = (
        _shapes_agree(row_slice.request.signature, head.request.signature)
        and row_slice.request.options.task == head.request.options.task
    )
    return small and alike and (row_slice.escalation is None) == (head.escalation is None)


def _shapes_agree(first: Signature, second: Signature) -> bool:
    """Whether what both have is of the same shape, so that a point which reads no more can serve them together."""
    if first == second:
        return True
    shapes = dict(first)
    return all(shapes.get(name, shape) == shape for name, shape in second) and bool(shapes.keys() & dict(second).keys())


def _leave_time_for_newcomers(view: SchedulerView, group: JobGroup, options: JobOptions) -> JobOptions:
    """Less what would make newcomers late who have as much time as the most urgent had, and then wait for a batch."""
    request = group.head.request
    max_seconds = (
        request.deadline - request.enqueued_at - view.later_seconds - least_seconds(view.points, view.max_batch_rows)
    )
    indices = np.flatnonzero(options.seconds <= max_seconds)
    if not indices.size or view.drop_policy == "Never":
        indices = np.arange(1)
    first_share = options.first_share if indices.size and indices[0] == 0 else 1.0
    return JobOptions(
        options.split_table,
        options.split_set,
        options.indices[indices],
        options.seconds[indices],
        options.values[indices],
        first_share,
    )


def _extra_slices(
    option_cache: OptionCache,
    group: JobGroup,
    serving_option: ServingOption,
    behind: list[tuple[_PlannedGroup, ProgramStep]],
) -> list[RowSlice]:
    """Rows behind a unit that are planned to go as it goes, and may go with it."""
    point = option_cache.point_options(group.slices).points[serving_option.point]
    extra_slices: list[RowSlice] = []
    for planned, step in behind:
        other, options = planned.chosen(step)
        rows = sum(
            count
            for option, count in options.serving_options(step.option)
            if option.escalation == serving_option.escalation
            and options.split_table.costs[option.point].name == point.name
        )
        for row_slice in other.slices:
            if rows > 0 and row_slice not in group.slices and can_share_batch(point, group.head, row_slice):
                extra_slices.append(row_slice if row_slice.rows <= rows else row_slice.first(rows))
            rows -= row_slice.rows
    return extra_slices


def _spare_seconds(planned: list[_PlannedGroup], steps: list[ProgramStep], start: float) -> tuple[float, float]:
    """When all these are served, one after the other, and how much later they could be."""
    end, spare = start, inf
    for step in steps:
        group, options = planned[step.first_job].chosen(step)
        end += float(options.seconds[step.option])
        spare = min(spare, group.deadline - end)
    return end, spare


POLICY = Policy(decide, uses_fallbacks=True, mixes_points=True, prepare=precompute_tables)
