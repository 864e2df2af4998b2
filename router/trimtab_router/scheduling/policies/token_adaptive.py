"""`TokenAdaptive`: plans the queue as batches, each with its operating point, by utility times accuracy.

It suits models whose points keep more or fewer tokens: one loaded model, any point for any batch, mixed tasks. Batches
are in the order of their deadlines. The schedule chooses a point or an escalation for each batch, or gives it up, so
that the expected utility of the rows in time is greatest. Rows that are given up stay queued until their drop time. A
better point must be worth more than its time is to all other rows (`shadow_price`).
"""

from dataclasses import dataclass
from math import inf

import numpy as np

from trimtab_pipelines.row_splits import Floats
from trimtab_router.scheduling.policies import slack_fit
from trimtab_router.scheduling.policies.deadline_schedule import DROPPED, solve
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, SchedulerView, WaitUntil
from trimtab_router.scheduling.policies.queue_plan import (
    GroupOptions,
    PlannedGroup,
    dispatch_first_batch,
    joined_groups,
    of_free_replica,
    spare_seconds,
)
from trimtab_router.scheduling.policies.split_table import ServingOption
from trimtab_router.scheduling.policies.token_options import (
    CandidateBatch,
    TokenOptions,
    candidate_batches,
    increasing_value,
    shadow_price,
)

MAX_BATCHES = 40  # planning horizon
_LEADERS, _MAX_JOINED = 3, 5  # the first batches that later ones may join, and the most batches joined
_TIME_TIE_BREAK = 1e-3  # of a second's average value: among plans of equal value, the faster is better


@dataclass(frozen=True, slots=True, eq=False)
class BatchOptions(GroupOptions):
    """Options of a batch: indices into `TokenOptions`."""

    token_options: TokenOptions
    rows: int
    """Of the batch."""

    def serving_options(self, option: int) -> list[tuple[ServingOption, int]]:
        return [(self.token_options.options[self.indices[option]], self.rows)]


def decide(view: SchedulerView, *, uses_shadow_price: bool = True, joins_batches: bool = True) -> Dispatch | WaitUntil:
    """Dispatch the first batch. `joins_batches`: its size is chosen with its point, else it is as large as possible."""
    if view.drop_policy == "Never":
        return slack_fit.decide(view)
    start = max(view.now, min(view.free_at(), default=view.now))
    token_options = TokenOptions(view)
    planned = plan_batches(view, token_options, uses_shadow_price=uses_shadow_price, joins_batches=joins_batches)
    if not planned:
        return slack_fit.decide(view)
    seconds = sum(float(entry.options.seconds[0]) for entry in planned)
    value = sum(float(entry.options.values[-1]) for entry in planned)
    time_price = _TIME_TIE_BREAK * value / max(seconds, 1e-9)
    schedule = solve([entry.job(price=time_price) for entry in planned], start)
    steps = schedule.steps
    first = next((index for index, step in enumerate(steps) if step.option != DROPPED), None)
    if first is None or (first and view.drop_policy == "Expired"):
        return slack_fit.decide(view)
    return dispatch_first_batch(view, planned, steps[first:], spare_seconds(planned, steps[first:], start)[1])


def plan_batches(
    view: SchedulerView, token_options: TokenOptions, *, uses_shadow_price: bool = True, joins_batches: bool = True
) -> list[PlannedGroup[CandidateBatch]]:
    batches = candidate_batches(view, MAX_BATCHES, small_first=joins_batches)
    price = shadow_price(view, batches, token_options) if uses_shadow_price else 0.0
    priced = _price_batches(token_options, [(batch, 1) for batch in batches], price)
    planned = of_free_replica(view, [entry for entry in priced if entry.options.indices.size])
    leaders = planned[: _LEADERS * joins_batches]
    joined = [
        (leader, *group)
        for index, leader in enumerate(leaders)
        for group in joined_groups(planned[index : index + _MAX_JOINED + 1], view.max_batch_rows)
    ]
    priced = _price_batches(token_options, [(batch, count) for _, batch, count in joined], price)
    for (leader, *_), entry in zip(joined, priced, strict=True):
        if entry.options.indices.size:
            leader.joined.append(entry)
    return planned


def _price_batches(
    token_options: TokenOptions, batches: list[tuple[CandidateBatch, int]], price: float
) -> list[PlannedGroup[CandidateBatch]]:
    """Return each batch with its options, valued at utility times accuracy less the price of extra time."""
    if not batches:
        return []
    seconds = token_options.seconds(np.array([batch.rows for batch, _ in batches]))
    values = token_options.values([batch.weights for batch, _ in batches])
    for index, (batch, _) in enumerate(batches):
        if batch.head.request.accuracy_floor or batch.provisional_value:
            values[index] = _allowed_values(token_options, batch, values[index])
    allowed = np.where(values > -inf, seconds, inf)
    values = values - price * (seconds - allowed.min(axis=1, initial=1e9)[:, None])
    _, indices = increasing_value(seconds, values)
    return [
        PlannedGroup(
            batch, BatchOptions(chosen, seconds[row, chosen], values[row, chosen], token_options, batch.rows), count
        )
        for row, ((batch, count), chosen) in enumerate(zip(batches, indices, strict=True))
    ]


def _allowed_values(token_options: TokenOptions, batch: CandidateBatch, values: Floats) -> Floats:
    """Remove options below the floor; for rows with a provisional response, count only what is gained."""
    row_slice, options = batch.head, token_options.options
    fit = np.array([_suits(token_options, option, batch) for option in options])
    if row_slice.provisional_response is None:
        return np.where(fit, values, -inf)
    fit &= np.array([option.escalation is None for option in options])
    if row_slice.escalation is not None and row_slice.escalation.accuracy is not None:
        is_target = np.array([option.point == row_slice.escalation.target for option in options])
        values = np.where(is_target, sum(batch.weights.values()) * row_slice.escalation.accuracy, values)
    return np.where(fit, values - batch.provisional_value, -inf)


def _suits(token_options: TokenOptions, option: ServingOption, batch: CandidateBatch) -> bool:
    request = batch.head.request
    if not token_options.points[option.point_index].suits(batch.head):
        return False
    escalates = option.escalation is not None
    return not escalates or token_options.accuracy_for(option, request.options.task) >= request.accuracy_floor


POLICY = Policy(decide, uses_fallbacks=True)
