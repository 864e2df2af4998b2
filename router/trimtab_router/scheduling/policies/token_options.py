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

from trimtab_pipelines.row_splits import Floats, Integers
from trimtab_pipelines.shadow_price import best_mixes
from trimtab_router.request import NO_OPTIONS
from trimtab_router.scheduling.policies.interface import Point, SchedulerView
from trimtab_router.scheduling.policies.option_cache import PointSet
from trimtab_router.scheduling.policies.queue_plan import RowGroup, group_rows, growing_sizes, priority_utility
from trimtab_router.scheduling.policies.schedule_table import increases
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


VALUE_ROUNDING = 1e-9


class _Basis:
    """What the options of some points have in common at any speed of the points."""

    def __init__(self, points: Sequence[Point], max_rows: int) -> None:
        table = np.array([(0.0, *profiled(point, max_rows)) for point in points])
        self.options = serving_options(points)
        self.first = np.array([option.point_index for option in self.options], np.int64)
        self.second = np.array([max(option.escalation_index, 0) for option in self.options], np.int64)
        """Points of the first and of the escalated rows. Shape (options,)."""
        self.first_seconds = table[self.first]
        """Profiled seconds of batches of 0, 1, 2, … rows. Shape (options, rows + 1)."""
        shares = np.array([0.0 if option.escalation is None else option.escalation.share for option in self.options])
        self.second_seconds = _escalation_seconds(table, self.second, shares)
        self.full_seconds: list[float] = table[:, -1].tolist()
        """Of a full batch, by point."""
        accuracy = np.array([option.accuracy for option in self.options])
        escalates = np.arange(accuracy.size) >= len(points)
        self.as_accurate = np.tri(accuracy.size, k=-1, dtype=np.bool_) & (accuracy >= accuracy[:, None])
        """Options before an escalation that are no less accurate. Shape (options, options)."""
        self.as_accurate &= escalates[:, None]
        self.escalates = bool(escalates.any())
        self._points, self._accuracies = points, dict[str, Floats]()
        self._tasks = {task for point in points for task in point.accuracy_by_task}
        self._tasks |= {task for o in self.options if o.escalation is not None for task in o.escalation.by_task or ()}

    def accuracies(self, task: str) -> Floats:
        """Return the expected accuracy of each option for a task. Shape (options,)."""
        known = task if task in self._tasks else ""
        if known not in self._accuracies:
            self._accuracies[known] = np.array([accuracy_for(self._points, each, known) for each in self.options])
        return self._accuracies[known]


def _escalation_seconds(table: Floats, points: Integers, shares: Floats) -> Floats:
    """Return the expected seconds of escalated rows, in batches that rows of other batches fill up.

    `table`: seconds of batches of 0, 1, 2, … rows at each point. Shape (points, rows + 1).
    `points`, `shares`: those of the escalations. Shape (options,).
    """
    max_rows = table.shape[1] - 1
    fill = min(ESCALATION_FILL_ROWS, max_rows)
    filled = np.minimum(table, np.arange(max_rows + 1) * (table[:, fill] / fill)[:, None])
    escalated = np.outer(shares, np.arange(max_rows + 1))
    whole = np.minimum(escalated.astype(np.int64), max(max_rows - 1, 0))
    less, more = filled[points[:, None], whole], filled[points[:, None], whole + 1]
    result: Floats = less + (escalated - whole) * (more - less)
    return result


def accuracy_for(points: Sequence[Point], option: ServingOption, task: str) -> float:
    """Return the expected accuracy of an option for a task; an escalation of all tasks adds the same to each."""
    point, escalation = points[option.point_index], option.escalation
    if escalation is not None and escalation.by_task:
        rule = escalation.by_task.get(task)
        return point.accuracy_for(task) if rule is None else rule.accuracy
    return min(point.accuracy_for(task) + (option.accuracy - point.accuracy), 1.0)


class TokenOptions:
    """The options of a view: its points, and the escalations that no option beats in both seconds and accuracy.

    The options of a batch are those that are worth more than every faster one, the fastest first.
    """

    def __init__(self, view: SchedulerView) -> None:
        self.points = list(view.points)
        rows = self._max_rows = view.max_batch_rows
        self._basis = basis = _basis(self.points, rows)
        now = [point.seconds(rows) for point in self.points]
        expected = [(point.expected_seconds or point.seconds)(rows) for point in self.points]
        pairs = zip(now, basis.full_seconds, strict=True)
        ratios = np.array([seconds / full if full > 0 else 1.0 for seconds, full in pairs])
        self._seconds = basis.first_seconds * ratios[basis.first][:, None]
        self.options, self._kept = basis.options, None
        shares = [mean / safe if safe > 0 else 1.0 for mean, safe in zip(expected, now, strict=True)]
        first = basis.first
        if basis.escalates:
            self._seconds += basis.second_seconds * ratios[basis.second][:, None]
            full = self._seconds[:, -1]
            self._kept = kept = np.flatnonzero(~(basis.as_accurate & (full <= full[:, None])).any(axis=1))
            self._seconds, self.options = self._seconds[kept], [basis.options[index] for index in kept.tolist()]
            first = first[kept]
        self.row_seconds: Floats = self._seconds[:, -1] * np.array(shares)[first] / rows
        """Expected seconds of a row in a full batch by option; only deadlines need a margin. Shape (options,)."""
        self.fastest_row_seconds = float(self.row_seconds.min())
        self._planned_rows, self._longest_seconds = view.full_batch_rows, self.longest_seconds(view.full_batch_rows)
        self._plain: dict[tuple[int, str], tuple[Integers, Floats, Floats]] = {}

    def accuracy_for(self, option: ServingOption, task: str) -> float:
        return accuracy_for(self.points, option, task)

    def longest_seconds(self, rows: int) -> float:
        """Return the seconds of one batch of so many rows, or of the largest, at the slowest option."""
        return float(self._seconds[:, min(rows, self._max_rows)].max())

    def values(self, weights: Mapping[str, float]) -> Floats:
        """Return utility times accuracy, shape (options,); `weights`: utility of the rows by task."""
        values: Floats = np.sum([weight * self._accuracies(task) for task, weight in weights.items()], axis=0)
        return values

    def _accuracies(self, task: str) -> Floats:
        accuracies = self._basis.accuracies(task)
        return accuracies if self._kept is None else accuracies[self._kept]

    def of_task(self, rows: int, task: str) -> tuple[Integers, Floats, Floats]:
        """Return the options of a batch of one task: indices, seconds and accuracies."""
        options = self._plain.get((rows, task))
        if options is None:
            options = self._plain[rows, task] = self.increasing(rows, self._accuracies(task))
        return options

    def increasing(self, rows: int, values: Floats) -> tuple[Integers, Floats, Floats]:
        """Return the options of a batch: indices, seconds and values. −inf is the value of a forbidden option.

        A batch larger than planned takes no longer than the longest planned one, or else at the fastest option.
        """
        seconds = self._seconds[:, rows]
        if rows > self._planned_rows:
            values = np.where(seconds > max(self._longest_seconds, float(seconds.min())), -inf, values)
        order = seconds.argsort(kind="stable")
        seconds, values = seconds[order], values[order]
        keeps = values > -inf
        keeps &= increases(values, VALUE_ROUNDING)
        return order[keeps], seconds[keeps], values[keeps]


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
_UTILIZATION = 0.77
"""Share of the replicas' time that the price lets arriving rows take. If they took all, queues would be as long as the
deadlines allow, and a short pause would make rows late.
"""


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
    fastest, longest = token_options.fastest_row_seconds, token_options.longest_seconds(waiting)
    work = (waiting + LOAD_MARGIN * rate_rps * horizon) * fastest + longest
    step_seconds = longest + (waiting + STEP * rate_rps * longest) * fastest / replicas
    if work <= replicas * horizon and step_seconds <= slack - (1.0 - _FREE_SLACK) * horizon:
        return 0.0  # replicas would be idle
    rows = max(waiting, rate_rps * horizon / _UTILIZATION)
    seconds = replicas * min(horizon, slack / _FREE_SLACK) * waiting / rows
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
    seconds, fastest = token_options.row_seconds.tolist(), token_options.fastest_row_seconds
    curves = []
    for level in levels.values():
        rows, weights = 0, dict[str, float]()
        for batch in level:
            rows += batch.rows
            for task, weight in batch.weights.items():
                weights[task] = weights.get(task, 0.0) + weight
        values = token_options.values(weights) / rows
        corners = best_mixes(list(zip(seconds, values.tolist(), strict=True)))
        curves.append((rows, corners[1:] or [(fastest, 0.0)]))
    return curves
