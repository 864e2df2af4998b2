"""Candidate batches of a queue, and `TokenOptions`: every operating point and escalation, with seconds and value.

Rows of similar utility share a batch, so that a batch which cannot be served in time has little value; tasks mix. All
batches of a queue are evaluated at once, as matrices of batches by options. The shadow price of a second is what
the last one adds if every row runs at the fastest point first, and the remaining seconds go where they add most
utility. It is 0 if every row can run at its best point, and if the replicas, with a margin for bursts, would be idle.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import inf, log2

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.row_splits import Floats, Integers
from trimtab_pipelines.shadow_price import best_mixes
from trimtab_router.request import NO_OPTIONS
from trimtab_router.scheduling.policies.interface import Point, SchedulerView
from trimtab_router.scheduling.policies.option_cache import PointSet
from trimtab_router.scheduling.policies.queue_plan import RowGroup, group_rows, growing_sizes, priority_utility
from trimtab_router.scheduling.policies.split_table import (
    ESCALATION_FILL_ROWS,
    ServingOption,
    profiled,
    serving_options,
)
from trimtab_router.scheduling.queue import MAX_SLICES
from trimtab_router.scheduling.stage_request import RowSlice, Signature


@dataclass(slots=True, eq=False)
class CandidateBatch(RowGroup):
    """Rows that are planned as one batch."""

    weights: dict[str, float] = field(default_factory=dict)
    """Value of correct responses to all rows, by task."""
    provisional_value: float = 0.0
    """Expected value of the provisional responses."""

    @property
    def level(self) -> int:
        options = self.head.request.options
        return utility_class(options.utility, options.priority)[1]

    def add(self, row_slice: RowSlice, rows: int) -> None:
        options = row_slice.request.options
        self.slices.append(row_slice)
        self.rows += rows
        value = utility_class(options.utility, options.priority)[0] * rows
        self.weights[options.task] = self.weights.get(options.task, 0.0) + value
        if row_slice.provisional_response is not None:
            self.provisional_value += value * row_slice.provisional_response.accuracy

    def goes_with(self, other: "CandidateBatch", max_batch_rows: int) -> bool:  # noqa: ARG002 - any size may be joined
        alone = self.head.alone or other.head.alone
        return not alone and _joining_key(self.head) == _joining_key(other.head)

    def joined(self, other: "CandidateBatch") -> "CandidateBatch":
        return CandidateBatch(
            min(self.deadline, other.deadline),
            [*self.slices, *other.slices],
            self.rows + other.rows,
            {
                task: self.weights.get(task, 0.0) + other.weights.get(task, 0.0)
                for task in {**self.weights, **other.weights}
            },
            self.provisional_value + other.provisional_value,
        )


def candidate_batches(view: SchedulerView, max_batches: int, *, small_first: bool = True) -> list[CandidateBatch]:
    """Return the first batches by the deadline of their first slice. `small_first`: whether the first are small."""
    return group_rows(
        view,
        CandidateBatch,
        _grouping_key,
        max_groups=max_batches,
        max_rows=view.max_batch_rows,
        max_slices=MAX_SLICES,
        sizes=growing_sizes(view.max_batch_rows) if small_first else (view.max_batch_rows,),
    )


def _grouping_key(row_slice: RowSlice) -> Hashable | None:
    """Return what grouped slices have in common; None for a slice that runs alone."""
    if row_slice.alone:
        return None
    if not row_slice.request.special:
        return _plain_grouping_key(row_slice.request.signature)
    options = row_slice.request.options
    return _joining_key(row_slice), utility_class(options.utility, options.priority)[1]


@lru_cache(maxsize=1024)
def _plain_grouping_key(signature: Signature) -> Hashable:
    """Return the key of slices whose requests ask for nothing special."""
    return (signature, 0.0, "", None), utility_class(NO_OPTIONS.utility, NO_OPTIONS.priority)[1]


def _joining_key(row_slice: RowSlice) -> Hashable:
    """Return what batches that may be joined have in common: floors and escalations, but not utility."""
    request = row_slice.request
    floor = request.accuracy_floor
    return request.signature, floor, request.options.task if floor else "", row_slice.escalation


@lru_cache(maxsize=1024)
def utility_class(utility: float, priority: int) -> tuple[float, int]:
    weight = priority_utility(utility, priority)
    return weight, round(log2(max(weight, 1e-9)))


_ROUNDING = 1e-9


class _Basis:
    """What the options of some points have in common at any speed of the points."""

    def __init__(self, points: Sequence[Point], max_rows: int) -> None:
        self.table = np.array([(0.0, *profiled(point, max_rows)) for point in points])
        """Profiled seconds of batches of 0, 1, 2, … rows. Shape (points, rows + 1)."""
        self.options = serving_options(points)
        looks = [option for option in self.options if option.escalation is not None]
        shares = np.array([option.escalation.share for option in looks if option.escalation is not None])
        self.first = np.array([option.point_index for option in looks], np.int64)
        self.second = np.array([[option.escalation_index] for option in looks], np.int64)
        """Points of the escalations. Shapes (escalations,) and (escalations, 1)."""
        escalated = np.outer(shares, np.arange(max_rows + 1))
        self.whole = np.minimum(escalated.astype(np.int64), max(max_rows - 1, 0))
        self.rest = escalated - self.whole
        """Expected escalated rows of a batch, whole ones and the rest. Shape (escalations, rows + 1)."""
        self.rows, self.fill = np.arange(max_rows + 1), min(ESCALATION_FILL_ROWS, max_rows)
        accuracy = np.array([option.accuracy for option in self.options])
        before = np.arange(accuracy.size) < np.arange(len(points), accuracy.size)[:, None]
        self.as_accurate = before & (accuracy >= accuracy[len(points) :, None])
        """Options before an escalation that are no less accurate. Shape (escalations, options)."""

    def escalation_seconds(self, seconds: Floats) -> Floats:
        """Return the expected seconds of the escalated rows, in batches that rows of other batches fill up.

        `seconds`: of batches of 0, 1, 2, … rows at each point. Shape (points, rows + 1).
        """
        filled = np.minimum(seconds, self.rows * (seconds[:, self.fill] / self.fill)[:, None])
        less, more = filled[self.second, self.whole], filled[self.second, self.whole + 1]
        result: Floats = less + self.rest * (more - less)
        return result


class TokenOptions:
    """The options of a view: its points, and the escalations that no option beats in both seconds and accuracy."""

    def __init__(self, view: SchedulerView) -> None:
        self.points = list(view.points)
        self._max_rows, self._planned_rows = view.max_batch_rows, view.full_batch_rows
        basis = _basis(self.points, view.max_batch_rows)
        now = np.array([point.seconds(view.max_batch_rows) for point in self.points])
        ratios = np.divide(now, basis.table[:, -1], out=np.ones(now.size), where=basis.table[:, -1] > 0)
        self._seconds = basis.table * ratios[:, None]
        self.options = basis.options
        if basis.first.size:
            again = self._seconds[basis.first] + basis.escalation_seconds(self._seconds)
            seconds = np.concatenate([self._seconds, again])
            beaten = (basis.as_accurate & (seconds[:, -1] <= again[:, -1:])).any(axis=1)
            kept = np.concatenate([np.arange(now.size), now.size + np.flatnonzero(~beaten)])
            self._seconds, self.options = seconds[kept], [basis.options[index] for index in kept.tolist()]

    def accuracy_for(self, option: ServingOption, task: str) -> float:
        """Return the expected accuracy of an option for a task; an escalation of all tasks adds the same to each."""
        point, escalation = self.points[option.point_index], option.escalation
        if escalation is not None and escalation.by_task:
            rule = escalation.by_task.get(task)
            return point.accuracy_for(task) if rule is None else rule.accuracy
        return min(point.accuracy_for(task) + (option.accuracy - point.accuracy), 1.0)

    @property
    def row_seconds(self) -> Floats:
        """Expected seconds of a row in a full batch by option; only deadlines need a margin. Shape (options,)."""
        rows, safe = self._max_rows, self._seconds[: len(self.points), -1]
        expected = np.array([(point.expected_seconds or point.seconds)(rows) for point in self.points])
        shares = np.divide(expected, safe, out=np.ones(safe.size), where=safe > 0)
        first = [option.point_index for option in self.options]
        row_seconds: Floats = self._seconds[:, -1] / rows * shares[first]
        return row_seconds

    def longest_seconds(self, rows: int) -> float:
        """Return the seconds of one batch of so many rows, or of the largest, at the slowest option."""
        return float(self._seconds[:, min(rows, self._max_rows)].max())

    def seconds(self, rows: Integers) -> Floats:
        """Return the seconds of batches. Shape (batches, options)."""
        seconds: Floats = self._seconds[:, rows].T
        return seconds

    def exceeds_plan(self, rows: Integers, seconds: Floats) -> NDArray[np.bool_]:
        """Return whether batches larger than planned take longer than any planned one. Shape (batches, options)."""
        longest = np.maximum(self.longest_seconds(self._planned_rows), seconds.min(axis=1))
        exceeds: NDArray[np.bool_] = (rows > self._planned_rows)[:, None] & (seconds > longest[:, None])
        return exceeds

    def accuracies(self, tasks: Sequence[str]) -> Floats:
        return np.array([[self.accuracy_for(option, task) for option in self.options] for task in tasks])

    def values(self, by_task: Sequence[Mapping[str, float]]) -> Floats:
        """Return utility times accuracy, shape (batches, options); `by_task`: utility of each batch's rows by task."""
        tasks = list({task: None for weights in by_task for task in weights})
        weights = np.array([[given.get(task, 0.0) for task in tasks] for given in by_task])
        values: Floats = weights @ self.accuracies(tasks)
        return values


def increasing_value(seconds: Floats, values: Floats) -> tuple[Integers, list[Integers]]:
    """Sort each batch's options, shape (batches, options), by seconds; −inf is the value of a forbidden one.

    Also return the options of each batch that are worth more than every faster one.
    """
    order = np.argsort(seconds, axis=1, kind="stable")
    sorted_values = np.take_along_axis(values, order, axis=1)
    best = np.maximum.accumulate(sorted_values, axis=1)
    keeps = sorted_values > -inf
    keeps[:, 1:] &= sorted_values[:, 1:] > best[:, :-1] + _ROUNDING
    return order, [indices[keep] for indices, keep in zip(order, keeps, strict=True)]


def _basis(points: Sequence[Point], max_rows: int) -> _Basis:
    """Return the basis of points, cached if their seconds are profiled and so last as long as they do."""
    all_profiled = all(point.profiled for point in points)
    return _cached_basis(PointSet(points), max_rows) if all_profiled else _Basis(points, max_rows)


@lru_cache(maxsize=64)
def _cached_basis(points: PointSet, max_rows: int) -> _Basis:
    return _Basis(points.points, max_rows)


LOAD_MARGIN, STEP = 1.5, 4.0
"""Factors on the arrival rate that the fastest option must carry: up to the deadline, and during one batch."""
_FREE_SLACK = 0.75
"""Share of a row's time that is left when its wait begins to raise the price."""


def shadow_price(view: SchedulerView, batches: Sequence[CandidateBatch], token_options: TokenOptions) -> float:
    """Return the utility of a second up to the most urgent deadline, if arriving rows are like the queued `batches`.

    A queue whose most urgent row has waited long has less time, so that it shortens: else it would stay as long as the
    deadlines allow, and one slow batch would make rows late. A second is free while the replicas would be idle: while
    the fastest option carries the load, and after the longest batch also what a step of the load brings during it, with
    time to spare.
    """
    if not batches:
        return 0.0
    urgent, row_seconds = batches[0].slices[0], token_options.row_seconds
    given_seconds = view.given_seconds(urgent)
    reserved_seconds = min(view.reserved_seconds, given_seconds / 2)
    horizon = max(given_seconds - reserved_seconds, 1e-6)
    waiting, rate_rps = sum(batch.rows for batch in batches), view.arrivals_rps()
    replicas, slack = max(view.ready_replicas, 1), max(view.slack_seconds(urgent) - reserved_seconds, 1e-6)
    fastest, longest = float(row_seconds.min()), token_options.longest_seconds(waiting)
    work = (waiting + LOAD_MARGIN * rate_rps * horizon) * fastest + longest
    step_seconds = longest + (waiting + STEP * rate_rps * longest) * fastest / replicas
    if work <= replicas * horizon and step_seconds <= slack - (1.0 - _FREE_SLACK) * horizon:
        return 0.0  # replicas would be idle
    seconds = replicas * min(horizon, slack / _FREE_SLACK) * waiting / max(waiting, rate_rps * horizon)
    if seconds >= waiting * float(row_seconds.max()):
        return 0.0  # every row has time for the slowest option
    return marginal_utility(_curves(batches, token_options), seconds)


def marginal_utility(curves: Sequence[tuple[int, Sequence[tuple[float, float]]]], seconds: float) -> float:
    """Return the value of the last second; `curves`: rows, and one row's corners (seconds, value), fastest first.

    If not all rows can be served, that is the value of serving more of them.
    """
    served = [(value / max(fast, 1e-9), rows * fast) for rows, ((fast, value), *_) in curves]
    left = seconds - sum(width for _, width in served)
    segments = [
        ((high - low) / (slow - fast), rows * (slow - fast))
        for rows, corners in curves
        for (fast, low), (slow, high) in pairwise(corners)
    ]
    left, segments = (seconds, served) if left < 0 else (left, segments)
    for slope, width in sorted(segments, reverse=True):
        left -= width
        if left < 0:
            return slope
    return 0.0


def _curves(
    batches: Sequence[CandidateBatch], token_options: TokenOptions
) -> list[tuple[int, list[tuple[float, float]]]]:
    """Return the rows of each utility level, and the value of one row over its seconds."""
    levels: dict[int, list[CandidateBatch]] = defaultdict(list)
    for batch in batches:
        if not batch.provisional_value:
            levels[batch.level].append(batch)
    seconds = token_options.row_seconds
    fastest = float(seconds.min())
    curves = []
    for level in levels.values():
        rows = sum(batch.rows for batch in level)
        values: Floats = token_options.values([batch.weights for batch in level]).sum(axis=0) / rows
        corners = best_mixes(list(zip(seconds.tolist(), values.tolist(), strict=True)))
        curves.append((rows, corners[1:] or [(fastest, 0.0)]))
    return curves
