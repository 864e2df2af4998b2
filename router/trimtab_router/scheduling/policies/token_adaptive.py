"""`TokenAdaptive`: plans the queue as batches, each with its operating point, by utility times accuracy.

It suits models whose points keep more or fewer tokens: one loaded model, any point for any batch, mixed tasks. Batches
are in the order of their deadlines. The schedule chooses a point or an escalation for each batch, or gives it up, so
that the expected utility of the rows in time is greatest. Rows that are given up stay queued until their drop time.

A batch takes a better point only if that is worth more than its time is to all other rows. The value of time follows
from the queue and the arrival rate (`shadow_price`), so that a short queue under high load does not run at a slow point
at the expense of later rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from trimtab_pipelines.row_splits import Floats, Integers
from trimtab_router.scheduling.policies import slack_fit
from trimtab_router.scheduling.policies.deadline_schedule import (
    DROPPED,
    Job,
    JointOption,
    ProgramStep,
    Schedule,
    assign_to_servers,
    solve,
)
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, SchedulerView, WaitUntil
from trimtab_router.scheduling.policies.job_groups import can_share_batch, first_rows, remaining_capacity
from trimtab_router.scheduling.policies.shadow_price import shadow_price
from trimtab_router.scheduling.policies.token_batches import CandidateBatch, candidate_batches
from trimtab_router.scheduling.policies.token_options import TokenOption, TokenOptions, increasing_value
from trimtab_router.scheduling.stage_request import RowSlice

MAX_BATCHES = 40
"""Planning horizon."""
_LEADERS, _MAX_JOINED = 3, 5
"""The first batches that later ones may join, and the most batches joined."""
_TIME_TIE_BREAK = 1e-3
"""Fraction of the average value of a second: among plans of equal value, the faster one is better."""


@dataclass(slots=True, eq=False)
class PlannedBatch:
    """A batch, or several joined, and its options, the fastest first.

    `batches` counts the joined batches; `groups` are joined batches that begin with this one.
    """

    batch: CandidateBatch
    batches: int
    options: Integers
    seconds: Floats
    values: Floats
    groups: list["PlannedBatch"] = field(default_factory=list)

    def job(self, time_weight: float) -> Job:
        joint = [JointOption(g.batches, g.seconds, g.values - time_weight * g.seconds) for g in self.groups]
        return Job(self.batch.deadline, self.seconds, self.values - time_weight * self.seconds, joint_options=joint)

    def chosen(self, step: ProgramStep) -> "PlannedBatch":
        """Return the batch that a step serves."""
        return self if step.jobs == 1 else next(group for group in self.groups if group.batches == step.jobs)


def decide(view: SchedulerView, *, uses_shadow_price: bool = True, joins_batches: bool = True) -> Dispatch | WaitUntil:
    """Dispatch the first batch of the plan.

    Args:
        view: the queue and the points.
        uses_shadow_price: whether time costs its value to other rows.
        joins_batches: whether the size of a batch is chosen with its point; else batches are as large as possible.
    """
    if view.drop_policy == "Never":
        return slack_fit.decide(view)
    start = max(view.now, min(view.free_at(), default=view.now))
    token_options = TokenOptions(view)
    planned = plan_batches(view, token_options, uses_shadow_price=uses_shadow_price, joins_batches=joins_batches)
    if not planned:
        return slack_fit.decide(view)
    seconds = sum(float(entry.seconds[0]) for entry in planned)
    time_weight = _TIME_TIE_BREAK * sum(float(entry.values[-1]) for entry in planned) / max(seconds, 1e-9)
    schedule = solve([entry.job(time_weight) for entry in planned], start)
    step = next((step for step in schedule.steps if step.option != DROPPED), None)
    if step is None or (view.drop_policy == "Expired" and schedule.steps[0].option == DROPPED):
        return slack_fit.decide(view)
    return _build_dispatch(view, token_options, planned, schedule, step, start)


def plan_batches(
    view: SchedulerView, token_options: TokenOptions, *, uses_shadow_price: bool = True, joins_batches: bool = True
) -> list[PlannedBatch]:
    """Return the first batches that the free replica should serve, with their options."""
    batches = candidate_batches(view, MAX_BATCHES, small_first=joins_batches)
    price = shadow_price(view, batches, token_options) if uses_shadow_price else 0.0
    singles = [
        entry for entry in _price_batches(token_options, [(batch, 1) for batch in batches], price) if entry.options.size
    ]
    free_at = view.free_at()
    if len(free_at) > 1:
        (own, *_) = assign_to_servers([entry.job(0.0) for entry in singles], free_at)
        singles = [singles[index] for index in own]
    groups = [
        (index, *group)
        for index in range(_LEADERS * joins_batches)
        for group in _joined_batches(singles[index:], view.max_batch_rows)
    ]
    for (index, *_), group in zip(
        groups, _price_batches(token_options, [(b, n) for _, b, n in groups], price), strict=True
    ):
        if group.options.size:
            singles[index].groups.append(group)
    return singles


def _joined_batches(planned: list[PlannedBatch], most_rows: int) -> list[tuple[CandidateBatch, int]]:
    """Return the first batch joined with those directly behind it."""
    groups: list[tuple[CandidateBatch, int]] = []
    joined = planned[0].batch if planned else None
    for count, entry in enumerate(planned[1 : _MAX_JOINED + 1], 2):
        if joined is None or not joined.goes_with(entry.batch, most_rows):
            break
        joined = joined.joined(entry.batch)
        groups.append((joined, count))
    return groups


def _price_batches(
    token_options: TokenOptions, batches: list[tuple[CandidateBatch, int]], price: float
) -> list[PlannedBatch]:
    """Return each batch with its options, valued at utility times accuracy less the price of extra time."""
    if not batches:
        return []
    seconds = token_options.seconds(np.array([batch.rows for batch, _ in batches]))
    values = token_options.values([batch.weights for batch, _ in batches])
    for index, (batch, _) in enumerate(batches):
        if batch.key[1] or batch.provisional_value:
            values[index] = _allowed_values(token_options, batch, values[index])
    allowed = np.where(values > -inf, seconds, inf)
    values = values - price * (seconds - allowed.min(axis=1, initial=1e9)[:, None])
    _, indices = increasing_value(seconds, values)
    return [
        PlannedBatch(batch, count, chosen, seconds[row, chosen], values[row, chosen])
        for row, ((batch, count), chosen) in enumerate(zip(batches, indices, strict=True))
    ]


def _allowed_values(token_options: TokenOptions, batch: CandidateBatch, values: Floats) -> Floats:
    """Remove options below the floor; for rows with a provisional response, count only what is gained."""
    row_slice = batch.slices[0]
    fit = np.array([option.point.suits(row_slice) and _reaches(option, row_slice) for option in token_options.options])
    if row_slice.provisional_response is None:
        return np.where(fit, values, -inf)
    fit &= np.array([option.escalation is None for option in token_options.options])
    if row_slice.escalation is not None and row_slice.escalation.accuracy is not None:
        is_target = np.array([option.point.name == row_slice.escalation.to for option in token_options.options])
        values = np.where(is_target, sum(batch.weights.values()) * row_slice.escalation.accuracy, values)
    return np.where(fit, values - batch.provisional_value, -inf)


def _reaches(option: TokenOption, row_slice: RowSlice) -> bool:
    """Return whether the mean accuracy after escalation reaches the floor."""
    return (
        option.escalation is None
        or option.accuracy_for(row_slice.request.options.task) >= row_slice.request.accuracy_floor
    )


def _build_dispatch(
    view: SchedulerView,
    token_options: TokenOptions,
    planned: list[PlannedBatch],
    schedule: Schedule,
    step: ProgramStep,
    start: float,
) -> Dispatch:
    """Dispatch a batch, filled with rows planned for the same option while no deadline is missed."""
    planned_batch = planned[step.first_job].chosen(step)
    option, rows = token_options.options[planned_batch.options[step.option]], planned_batch.batch.rows
    takes = first_rows(planned_batch.batch.slices, rows)
    if option.escalation is not None:
        return Dispatch(option.point, takes, escalation=option.escalation.rule)
    behind = schedule.steps[schedule.steps.index(step) :]
    spare = _spare_seconds(planned, behind, start)
    if spare > 0 and not takes[0].alone and rows < view.max_batch_rows:
        extra_slices = _extra_slices(
            token_options,
            planned_batch,
            option,
            [(planned[entry.first_job].chosen(entry), entry) for entry in behind[1:]],
        )
        takes += first_rows(extra_slices, remaining_capacity(view, option.point, rows, spare))
    return Dispatch(option.point, takes)


def _extra_slices(
    token_options: TokenOptions,
    planned_batch: PlannedBatch,
    option: TokenOption,
    behind: list[tuple[PlannedBatch, ProgramStep]],
) -> Iterator[RowSlice]:
    taken = {id(row_slice.request) for row_slice in planned_batch.batch.slices}
    return (
        row_slice
        for planned, step in behind
        if step.option != DROPPED and token_options.options[planned.options[step.option]] is option
        if planned.batch.key[1:] == planned_batch.batch.key[1:]
        for row_slice in planned.batch.slices
        if id(row_slice.request) not in taken
        and can_share_batch(option.point, planned_batch.batch.slices[0], row_slice)
    )


def _spare_seconds(planned: list[PlannedBatch], steps: Sequence[ProgramStep], start: float) -> float:
    """Return by how many seconds all steps may be delayed; negative if a deadline is missed."""
    end, spare = start, inf
    for step in steps:
        if step.option != DROPPED:
            entry = planned[step.first_job].chosen(step)
            end += float(entry.seconds[step.option])
            spare = min(spare, entry.batch.deadline - end)
    return spare


POLICY = Policy(decide, uses_fallbacks=True)
