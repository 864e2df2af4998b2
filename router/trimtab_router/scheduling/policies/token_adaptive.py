"""`TokenAdaptive`: plans the queue as batches, each with its operating point, by utility times accuracy.

It suits models whose points keep more or fewer tokens: one loaded model, any point for any batch, mixed tasks. Batches
are in the order of their deadlines. The schedule chooses a point or an escalation for each batch, or gives it up, so
that the expected utility of the rows in time is greatest. Rows that are given up stay queued until their drop time. A
better point must be worth more than its time is to all other rows (`shadow_price`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import inf
from typing import NamedTuple

import numpy as np

from trimtab_pipelines.row_splits import Floats
from trimtab_router.scheduling.policies import slack_fit
from trimtab_router.scheduling.policies.deadline_schedule import assign_to_servers, solve
from trimtab_router.scheduling.policies.interface import Dispatch, Point, Policy, SchedulerView, WaitUntil
from trimtab_router.scheduling.policies.queue_plan import (
    GroupOptions,
    PlannedGroup,
    dispatch_first_batch,
    fill_batch,
    joined_groups,
    of_free_replica,
    spare_seconds,
)
from trimtab_router.scheduling.policies.schedule_table import DROPPED, SECONDS_ROUNDING, ProgramStep, increases
from trimtab_router.scheduling.policies.split_table import ServingOption, profiled
from trimtab_router.scheduling.policies.token_options import (
    VALUE_ROUNDING,
    CandidateBatch,
    TokenOptions,
    candidate_batches,
    shadow_price,
)
from trimtab_router.scheduling.stage_request import RowSlice

MAX_BATCHES = 40  # planning horizon
MAX_PATHS = 64
_LEADERS, _MAX_JOINED = 3, 5  # the first batches that later ones may join, and the most batches joined
_WORTH_ROUNDING = 1e-9
_OVERLOAD_BUSY_SHARE = 0.6
"""Share of the replicas' time that full batches at the fastest point need, from which small batches have a price."""
_OVERLOAD_PRICE_SHARE = 0.5
"""Share of the value of the rows that full batches would serve in a second: its price in overload."""
_TIME_TIE_BREAK = 1e-4  # of a second's average value: among plans of equal value, the faster is better


@dataclass(frozen=True, slots=True, eq=False)
class BatchOptions(GroupOptions):
    """Options of a batch: indices into `options`."""

    options: Sequence[ServingOption]
    rows: int
    """Of the batch."""

    def serving_options(self, option: int) -> list[tuple[ServingOption, int]]:
        return [(self.options[self.indices[option]], self.rows)]


def decide(view: SchedulerView, *, uses_shadow_price: bool = True, joins_batches: bool = True) -> Dispatch | WaitUntil:
    """Dispatch the first batch. `joins_batches`: its size is chosen with its point, else it is as large as possible."""
    if view.drop_policy == "Never" or view.concurrent_rows:  # there is no queue of batches to plan
        return slack_fit.decide(view)
    free_at = view.free_at()
    start = max(view.now, min(free_at, default=view.now))
    if joins_batches and len(view.points) == 1 and not view.points[0].escalations:
        decision = _serve_at(view, view.points[0], start, free_at)
        if decision is not None:
            return decision
    token_options = TokenOptions(view)
    planned = plan_batches(view, token_options, uses_shadow_price=uses_shadow_price, joins_batches=joins_batches)
    if not planned:
        return slack_fit.decide(view)
    steps, reserved_seconds = _solve(view, planned, token_options, start)
    first = next((index for index, step in enumerate(steps) if step.option != DROPPED), None)
    if first is None or (first and view.drop_policy == "Expired"):
        return slack_fit.decide(view)
    spare = spare_seconds(planned, steps[first:], start)[1] - reserved_seconds
    return dispatch_first_batch(view, planned, steps[first:], spare)


def _solve(
    view: SchedulerView, planned: Sequence[PlannedGroup[CandidateBatch]], token_options: TokenOptions, start: float
) -> tuple[Sequence[ProgramStep], float]:
    """Return the best schedule, and the seconds by which it ends before the deadlines.

    These are `view.reserved_seconds`, or 0 if batches would be given up for them. If batches are given up all the same,
    those that make least of their time are.
    """
    time_price, reserved_seconds = _time_price(planned), view.reserved_seconds
    jobs = [entry.job(price=time_price) for entry in planned]
    if reserved_seconds:
        earlier = [
            job if entry.group.provisional_value else replace(job, deadline=job.deadline - reserved_seconds)
            for job, entry in zip(jobs, planned, strict=True)
        ]
        steps = solve(earlier, start).steps
        if all(step.option != DROPPED for step in steps):
            return steps, reserved_seconds
    steps = solve(jobs, start).steps
    if any(step.option == DROPPED for step in steps):
        overload_price = _overload_price(view, planned, token_options.fastest_row_seconds)
        if overload_price:
            steps = solve([entry.job(price=time_price + overload_price) for entry in planned], start).steps
    return steps, 0.0


def _overload_price(view: SchedulerView, planned: Sequence[PlannedGroup[CandidateBatch]], row_seconds: float) -> float:
    """Return the price of a second in which full batches would serve other rows; 0 if there is time for small ones.

    Without it the most urgent rows of a long queue leave in small batches, and so do those behind them, until most
    rows are late although full batches carry the load. `row_seconds`: of a row in a full batch at the fastest option.
    """
    given_seconds = max(view.given_seconds(planned[0].group.head), 1e-6)
    rows = sum(entry.group.rows for entry in planned)
    busy_share = (rows / given_seconds + view.arrivals_rps() / max(view.ready_replicas, 1)) * row_seconds
    if busy_share < _OVERLOAD_BUSY_SHARE:
        return 0.0
    row_value = sum(float(entry.options.values[0]) for entry in planned) / rows
    return _OVERLOAD_PRICE_SHARE * row_value / row_seconds


class _Path(NamedTuple):
    """Batches that are served one after the other: when they end, what they are worth, and the last one."""

    end: float
    worth: float
    before: "_Path | None" = None
    first: int = 0
    stop: int = 0
    """Indices of the batches that the last one joins."""


def _serve_at(view: SchedulerView, point: Point, start: float, free_at: Sequence[float]) -> Dispatch | WaitUntil | None:
    """Decide if all rows have one option, as `solve` does; None for rows with a floor or a provisional response."""
    profile = profiled(point, view.max_batch_rows)
    ratio = point.seconds(view.max_batch_rows) / profile[-1] if profile[-1] > 0 else 1.0
    sole = view.waiting.sole()
    if sole is not None and sole.rows <= view.max_batch_rows and _is_worth_its_time(point, sole):  # the common case
        in_time = start + profile[sole.rows - 1] * ratio <= view.now + view.slack_seconds(sole) + SECONDS_ROUNDING
        return Dispatch(point, [sole]) if in_time else slack_fit.decide(view)
    batches, seconds = candidate_batches(view, MAX_BATCHES), [each * ratio for each in profile]
    if len(free_at) > 1 and batches:
        jobs = [(seconds[batch.rows - 1], batch.deadline) for batch in batches]
        batches = [batches[index] for index in assign_to_servers(jobs, free_at)[0]]
    if not batches or any(batch.head.request.accuracy_floor or batch.provisional_value for batch in batches):
        return None
    served = _best_batches(view, point, batches, seconds, start)
    if not served or (served[0].first and view.drop_policy == "Expired"):
        return slack_fit.decide(view)
    first, *others = (reduce(CandidateBatch.joined, batches[path.first : path.stop]) for path in served)
    spare = min([batches[path.first].deadline - path.end for path in served])
    return Dispatch(point, fill_batch(view, point, first, first.rows, [(other, other.rows) for other in others], spare))


def _is_worth_its_time(point: Point, row_slice: RowSlice) -> bool:
    request = row_slice.request
    is_plain = row_slice.provisional_response is None and not request.accuracy_floor
    return is_plain and request.options.utility > 0 and point.accuracy_for(request.options.task) > 0


def _best_batches(
    view: SchedulerView, point: Point, batches: Sequence[CandidateBatch], seconds: Sequence[float], start: float
) -> list[_Path]:
    """Return the batches that are worth most in time, joined if that is faster; `seconds` of 1, 2, … rows."""
    worths = [sum([value * point.accuracy_for(task) for task, value in batch.weights.items()]) for batch in batches]
    price = _TIME_TIE_BREAK * sum(worths) / max(sum([seconds[batch.rows - 1] for batch in batches]), 1e-9)
    steps = [
        [
            (index + count, seconds[rows - 1], sum(worths[index : index + count]) - price * seconds[rows - 1])
            for count, rows in ((1, batch.rows), *_joined_rows(batches, index, view.max_batch_rows))
        ]
        for index, batch in enumerate(batches)
    ]
    deadlines = [batch.deadline + SECONDS_ROUNDING for batch in batches]
    path = None
    if all(alone[2] > 0.0 for alone, *_ in steps):
        path = _best_path(deadlines, steps, start, drops=False)
    path = path or _best_path(deadlines, steps, start, drops=True)
    served: list[_Path] = []
    while path is not None and path.before is not None:
        served.append(path)
        path = path.before
    return served[::-1]


def _best_path(
    deadlines: Sequence[float], steps: Sequence[Sequence[tuple[int, float, float]]], start: float, *, drops: bool
) -> _Path | None:
    """Return the path of most worth, which serves all batches unless it `drops` some; None if there is none.

    `steps` from each batch: the batch that follows, seconds and worth.
    """
    paths: list[list[_Path]] = [[_Path(start, 0.0)], *([] for _ in steps)]
    for index, deadline in enumerate(deadlines):
        front = _undominated(paths[index])
        for path in front[:: len(front) // MAX_PATHS + 1]:
            if drops:
                paths[index + 1].append(path)
            for stop, seconds, worth in steps[index]:
                if path.end + seconds <= deadline:
                    paths[stop].append(_Path(path.end + seconds, path.worth + worth, path, index, stop))
    return next(reversed(_undominated(paths[-1])), None)


def _undominated(paths: list[_Path]) -> list[_Path]:
    """Return the paths that are worth more than all that end earlier; of equal ones, those that drop the last rows."""
    if len(paths) == 1:
        return paths
    kept, best = list[_Path](), -inf
    for path in sorted(paths, key=lambda path: (round(path.end, 9), path.stop, -path.first)):
        if path.worth > best + _WORTH_ROUNDING:
            kept.append(path)
            best = path.worth
    return kept


def _joined_rows(batches: Sequence[CandidateBatch], index: int, max_rows: int) -> list[tuple[int, int]]:
    """Return the numbers of batches that may be joined from a leader on, and their rows."""
    joined: list[tuple[int, int]] = []
    first, rows = batches[index], batches[index].rows
    for count, other in enumerate(batches[index + 1 : index + _MAX_JOINED + 1] if index < _LEADERS else (), 2):
        rows += other.rows
        if rows > max_rows or not first.goes_with(other, max_rows):
            break
        joined.append((count, rows))
    return joined


def _time_price(planned: Sequence[PlannedGroup[CandidateBatch]]) -> float:
    """Return the price of a second by which the faster of two plans of equal value is better."""
    seconds = sum([float(entry.options.seconds[0]) for entry in planned])
    return _TIME_TIE_BREAK * sum([float(entry.options.values[-1]) for entry in planned]) / max(seconds, 1e-9)


def plan_batches(
    view: SchedulerView, token_options: TokenOptions, *, uses_shadow_price: bool = True, joins_batches: bool = True
) -> list[PlannedGroup[CandidateBatch]]:
    batches = candidate_batches(view, MAX_BATCHES, small_first=joins_batches)
    price = shadow_price(view, batches, token_options) if uses_shadow_price else 0.0
    priced = [_price_batch(token_options, batch, 1, price) for batch in batches]
    planned = of_free_replica(view, [entry for entry in priced if entry.options.indices.size])
    for index, leader in enumerate(planned[: _LEADERS * joins_batches]):
        for batch, count in joined_groups(planned[index : index + _MAX_JOINED + 1], view.max_batch_rows):
            entry = _price_batch(token_options, batch, count, price)
            if entry.options.indices.size:
                leader.joined.append(entry)
    return planned


def _price_batch(
    token_options: TokenOptions, batch: CandidateBatch, count: int, price: float
) -> PlannedGroup[CandidateBatch]:
    """Return a batch with its options, valued at utility times accuracy less the price of extra time."""
    special = batch.head.request.accuracy_floor or batch.provisional_value
    if len(batch.weights) == 1 and not special:
        [(task, weight)] = batch.weights.items()
        indices, seconds, accuracies = token_options.of_task(batch.rows, task)
        values = weight * accuracies
    else:
        values = token_options.values(batch.weights)
        if special:
            values = _allowed_values(token_options, batch, values)
        indices, seconds, values = token_options.increasing(batch.rows, values)
    if price and indices.size > 1:
        values = values - price * (seconds - seconds[0])
        keeps = increases(values, VALUE_ROUNDING)
        indices, seconds, values = indices[keeps], seconds[keeps], values[keeps]
    return PlannedGroup(batch, BatchOptions(indices, seconds, values, token_options.options, batch.rows), count)


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
