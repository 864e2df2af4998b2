"""`ModalityMix`: plans the whole queue as one schedule and dispatches the first batch of the plan.

Jobs are in the order of their deadlines, each with its exact splits over points and batches (`split_table`). The
schedule serves as many jobs as possible in time, and then as many rows correctly as possible. Accuracy therefore rises
by itself while the queue is short, and a job is given up only if not even the fastest splits meet all deadlines: the
least valuable one, which stays queued until its drop time. Small jobs are grouped: the most urgent into a batch of the
size that pays, later ones into full batches.

With several replicas, each job is planned on the replica that would end it first, and the free replica receives its
own. A shadow price reserves time for later arrivals. Escalation is an option like any other; rows with a provisional
response yield to rows without one.
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
"""Planning horizon in groups."""
ESCALATION_FILL_SHARE = 0.5
"""Share of the slowest full batch's seconds that escalated rows reserve while they wait for others to fill their
batch."""


@dataclass(frozen=True, slots=True)
class _PlannedGroup:
    """A group, its options, and the first few groups as one with their joint options."""

    group: JobGroup
    options: JobOptions
    joint: tuple[tuple[int, JobGroup, JobOptions], ...] = ()

    def job(self, *, last: bool) -> Job:
        """Return it as a job of the schedule; the `last` group has no joint options."""
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
        """Return the group and options that a step serves."""
        for count, group, options in self.joint:
            if count == step.jobs:
                return group, options
        return self.group, self.options


def decide(view: SchedulerView, *, splits: bool = True) -> Dispatch | WaitUntil:
    """Dispatch the first batch of the plan.

    Args:
        view: the queue and the points.
        splits: whether rows of one job may run at several points.
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
    """Order the steps, and return by how many seconds all may be delayed; negative if a deadline is missed.

    Steps are in the order of deadlines, except that escalations in front let the first group without a response go
    before them while no escalation becomes late.
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
    """Return the first groups that can be served in time, and the slices that no option can save."""
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
    dropped = set(map(id, unreachable))  # a large job has several groups
    return [entry for entry in planned if id(entry.group.head) not in dropped], list(
        {id(p): p for p in unreachable}.values()
    )


def _for_free_replica(view: SchedulerView, planned: list[_PlannedGroup]) -> list[_PlannedGroup]:
    """Return the groups that the free replica would end first."""
    free_at = view.free_at()
    if len(free_at) < 2 or not planned:
        return planned
    shares = assign_to_servers([entry.job(last=True) for entry in planned], free_at)
    return [planned[index] for index in shares[0]]


def _with_joint_options(option_cache: OptionCache, planned: list[_PlannedGroup]) -> _PlannedGroup:
    """Return the first group with the options of joining the groups behind it in one batch."""
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
    """Return whether the inputs that both have agree in shape, so that a point which reads no others can batch them."""
    if first == second:
        return True
    shapes = dict(first)
    return all(shapes.get(name, shape) == shape for name, shape in second) and bool(shapes.keys() & dict(second).keys())


def _leave_time_for_newcomers(view: SchedulerView, group: JobGroup, options: JobOptions) -> JobOptions:
    """Remove options so long that a new request with the same slack as the most urgent row would be late."""
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
    """Return slices behind a group that are planned for the same point and may share its batch."""
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
    """Return when all steps are done, and by how many seconds they may be delayed."""
    end, spare = start, inf
    for step in steps:
        group, options = planned[step.first_job].chosen(step)
        end += float(options.seconds[step.option])
        spare = min(spare, group.deadline - end)
    return end, spare


POLICY = Policy(decide, uses_fallbacks=True, mixes_points=True, prepare=precompute_tables)
