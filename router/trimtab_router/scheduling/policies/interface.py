"""Interface of a scheduling policy: what it reads when a replica has capacity, and what it may return.

The contract for a policy's author:

- `SchedulerView.waiting` yields the queued row slices by deadline; `batch_candidates` yields the slices that may share
  a batch with one. Iterating changes nothing. A slice has its rows, its deadline (`request.deadline` for the whole
  request; `request.due_at` subtracts the prefill of a long prompt; `SchedulerView.slack_seconds` is the slack of this
  stage), its request options (`request.options`), the accuracy that this stage must reach for it
  (`request.accuracy_floor`), its inputs (`request.signature`) and, for rows that await escalation, how they were served
  (`provisional_response`) and the rule (`escalation`).
- A point may serve a slice if it `suits` the slice: it reaches the floor for the slice's task, and an escalation goes
  to a point that is more accurate than the first. `SchedulerView.points_for` lists these points. If there are none, the
  scheduler drops the slice with that reason, or keeps its provisional response.
- A policy that mixes points over the rows of one request keeps the mean above the floor; the scheduler checks no floor.
- A policy returns one `Dispatch`, or `WaitUntil`: no batch is dispatched before that time. Both may name slices to
  drop. `WaitUntil(view.now, drops)` drops these slices and asks the policy again. A dropped slice keeps its provisional
  response if it has one; any other request loses all its rows.
- `Dispatch.escalation` returns low-confidence rows to the queue, if the stage declares a confidence output. Their
  response stands if no better one arrives before their deadline.
- In overload, the slices of least value are dropped first: see `first_to_drop`. A priority has no effect while every
  row can be served in time, so a patient request of high priority never delays an urgent one without need.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from typing import Literal

from trimtab_router.scheduling.queue import MAX_SLICES, BatchCandidates, DeadlineQueue
from trimtab_router.scheduling.stage_request import EscalationRule, RowSlice, StageRequest

DropPolicy = Literal["Predicted", "Expired", "Never"]
NEVER = float("inf")
RESPONSE_MARGIN_SECONDS = 0.005
"""Time before the deadline at which a provisional response is sent, so that it is not late itself."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Escalation(EscalationRule):
    """A profiled escalation: all rows run at one point, then those of low confidence run at another, `to`."""

    accuracy: float = 0.0
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Point:
    """An operating point that the plan allows, of the planned variant or of another one that the replica hosts."""

    name: str
    accuracy: float
    """Expected accuracy over all tasks."""
    seconds: Callable[[int], float]
    """Predicted service time of a batch by its rows, with a margin for variation. It never falls; 0 if unknown."""
    inputs: frozenset[str] | None = None
    """Names of the inputs that a batch carries; None for all."""
    accuracy_by_task: Mapping[str, float] = field(default_factory=dict)
    """Expected accuracy of rows of these tasks; other tasks have `accuracy`."""
    profiled: tuple[float, ...] = ()
    """Planned service times of batches of 1, 2, … rows; empty if the plan has none."""
    escalations: tuple[Escalation, ...] = ()
    """Profiled escalations of rows served first at this point."""
    variant: str = ""
    expected_seconds: Callable[[int], float] | None = None
    """`seconds` without the margin; None for none."""
    key: tuple[str, str] = field(init=False)
    """Variant and name, which identify the point."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.variant, self.name))

    def accuracy_for(self, task: str) -> float:
        """Return the expected accuracy of rows of a task, or of all rows if the request names none."""
        return self.accuracy_by_task.get(task, self.accuracy)

    def reaches(self, request: StageRequest) -> bool:
        return (
            not request.accuracy_floor or self.accuracy_for(request.options.task) >= request.accuracy_floor - _ROUNDING
        )

    def suits(self, row_slice: RowSlice) -> bool:
        """Whether it reaches the floor of these rows and improves on their provisional response."""
        provisional, escalation = row_slice.provisional_response, row_slice.escalation
        if provisional is not None and escalation is not None and escalation.accuracy is not None:
            return self.key == escalation.target  # no other point was profiled on escalated rows
        if provisional is not None and self.accuracy_for(row_slice.request.options.task) <= provisional.accuracy:
            return False
        return self.reaches(row_slice.request)

    def uses_any_input_of(self, row_slice: RowSlice) -> bool:
        return self.inputs is None or any(name in self.inputs for name, _ in row_slice.request.signature)


@dataclass(slots=True, eq=False)  # frozen would double the cost of construction
class SchedulerView:
    """What a policy may use for one decision about a stage. Treat it as immutable."""

    now: float
    """Seconds on the scheduler's clock."""
    waiting: DeadlineQueue
    points: Sequence[Point]
    """The allowed operating points, preferred first."""
    max_batch_rows: int
    later_seconds: float
    """Predicted service time of the downstream stages."""
    drop_policy: DropPolicy
    ready_replicas: int = 1
    concurrent_rows: bool = False
    """Whether replicas serve rows concurrently, so that each is dispatched alone."""
    free_at: Callable[[], Sequence[float]] = tuple
    """Expected time at which each replica is free, ascending."""
    shadow_price: Callable[[], float] = float
    """Λ: expected correct rows that one second of a replica is worth to later arrivals."""
    mixes_points: bool = False
    """Whether rows of one request may run at several points, so that no single point has to reach the floor."""
    arrivals_rps: Callable[[], float] = float
    """Recent arrival rate in rows per second."""
    loaded_point: tuple[str, str] = ("", "")
    """Variant and operating point that the free replica ran last; empty if it has run none."""
    reserved_seconds: float = 0.0
    """What rows leave beyond `later_seconds`, if they can: expected queueing of the downstream stages, and a margin."""
    planned_batch_rows: int = 0
    """Rows of a planned batch: a larger one takes no longer than the longest planned one."""

    @property
    def full_batch_rows(self) -> int:
        """Rows of a full batch as planned."""
        return min(self.planned_batch_rows or self.max_batch_rows, self.max_batch_rows)

    def given_seconds(self, row_slice: RowSlice) -> float:
        """Return the seconds from a slice's arrival in which this stage must serve it."""
        return row_slice.request.deadline - row_slice.request.enqueued_at - self.later_seconds

    def points_for(self, row_slice: RowSlice) -> Sequence[Point]:
        """Return the points that may serve a slice, preferred first; none if no point reaches its floor.

        A point that reads an input which the slice lacks is less accurate than it states. It serves such a slice only
        if there is no other point.
        """
        if len(self.points) == 1 and row_slice.provisional_response is None and not row_slice.request.accuracy_floor:
            return self.points
        allowed = answerable_from(self.points, row_slice.request.inputs) or self.points
        suiting = [point for point in allowed if point.suits(row_slice)]
        return [point for point in suiting if point.uses_any_input_of(row_slice)] or suiting[:1]

    def candidates(self, head: RowSlice, point: Point) -> BatchCandidates:
        return self.waiting.batch_candidates(head, point.inputs, point.suits)

    def slack_seconds(self, row_slice: RowSlice) -> float:
        return row_slice.request.due_at - self.now - self.later_seconds

    def drop_time(self, row_slice: RowSlice) -> float:
        """Return when an undispatched slice is dropped: in time for a provisional response, if it has one."""
        points = self.points_for(row_slice) if row_slice.request.special and not self.mixes_points else self.points
        if not points:
            return -NEVER
        policy = "Predicted" if row_slice.provisional_response is not None else self.drop_policy
        match policy:
            case "Never":
                return NEVER
            case "Expired":
                return row_slice.request.deadline
            case "Predicted":
                seconds = least_seconds(points, min(row_slice.rows, self.max_batch_rows))
                seconds += self.reserved_seconds if row_slice.provisional_response is not None else 0.0
                return row_slice.request.due_at - seconds - self.later_seconds

    def fitting_rows(self, point: Point, head: RowSlice, full: int) -> int:
        """Return the most rows whose batch meets the deadline of `head`; 0 if one row does not."""
        if self.drop_policy == "Never":
            return full
        return rows_within(point, self.slack_seconds(head), 0, full)


def rows_within(point: Point, seconds: float, low: int, high: int) -> int:
    """Return the most rows from `low` to `high` whose batch takes at most these seconds, by bisection."""
    if point.seconds(high) <= seconds:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if point.seconds(middle) <= seconds else (low, middle)
    return low


def answerable_from(points: Sequence[Point], given: Collection[str]) -> list[Point]:
    return [point for point in points if point.inputs is None or all(name in given for name in point.inputs)]


def least_seconds(points: Sequence[Point], rows: int) -> float:
    if len(points) == 1:  # the common case, several times a batch
        return points[0].seconds(rows)
    return min(point.seconds(rows) for point in points)


@dataclass(slots=True)
class Dispatch:
    """Decision to dispatch a batch. Treat it as immutable."""

    point: Point
    row_slices: Sequence[RowSlice]
    """The batch; the last slice may be a part of a queued one."""
    drops: Sequence[RowSlice] = ()
    """Slices to drop."""
    escalation: EscalationRule | None = None
    """The rule by which rows of the batch return to the queue; None for none."""


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Decision to dispatch nothing before this time unless more rows arrive, and to drop some slices."""

    time: float = NEVER
    drops: Sequence[RowSlice] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """A scheduling policy."""

    decide: Callable[[SchedulerView], Dispatch | WaitUntil]
    uses_fallbacks: bool = False
    """Whether batches may run at other points than the planned one."""
    mixes_points: bool = False
    """Whether rows of one request may run at several points."""
    prepare: Callable[[Sequence[Point], int], Callable[[], None]] | None = None
    """Builds the tables that decisions look up, given the points and the batch rows of a new plan; None if there are
    none. The returned function may take up to a second and runs on another thread while decisions go on."""


def overloaded(view: SchedulerView, candidates: BatchCandidates, point: Point) -> bool:
    row_seconds = point.seconds(view.max_batch_rows) / view.max_batch_rows / max(view.ready_replicas, 1)
    start = view.now + view.later_seconds
    return any(start + rows * row_seconds > deadline for deadline, rows in candidates.due())


DropRank = tuple[int, float]  # a greater rank is dropped later
_LOWEST: DropRank = (-1_000_000, 0.0)


def drop_rank(request: StageRequest, row_seconds: float = 1.0) -> DropRank:
    """Return a request's priority, then its utility per second; `row_seconds` at the fastest suitable point."""
    return -request.options.priority, request.options.utility / (request.rows * max(row_seconds, 1e-9))


def rows_ahead_of(request: StageRequest, waiting: Iterable[RowSlice]) -> int:
    """Count the rows due no later than a request that are not dropped before it."""
    rows, rank = 0, drop_rank(request)
    for row_slice in waiting:
        if row_slice.request.due_at > request.due_at:
            break
        if row_slice.provisional_response is None and drop_rank(row_slice.request) >= rank:
            rows += row_slice.rows
    return rows


def first_to_drop(view: SchedulerView) -> list[RowSlice]:
    """Return the slices to drop so that all others can be served in time; none if all have the same rank.

    In the order of deadlines, if full batches would miss one, the slice of the lowest rank goes (as Moore and Hodgson
    drop the longest job). A slice with a provisional response goes first, because its request keeps that response.
    """
    if not view.waiting.special_rows or view.drop_policy != "Predicted":
        return []
    begin, highest = view.now + view.later_seconds, _LOWEST
    busy_seconds, dropped = 0.0, []
    heap: list[tuple[DropRank, int, RowSlice, float]] = []
    for index, row_slice in enumerate(islice(view.waiting, MAX_SLICES)):
        row_seconds = _row_seconds(view, row_slice)
        seconds = row_slice.rows * row_seconds
        busy_seconds += seconds
        rank = drop_rank(row_slice.request, row_seconds) if row_slice.provisional_response is None else _LOWEST
        highest = max(highest, rank)
        heappush(heap, (rank, -index, row_slice, seconds))
        while heap[0][0] < highest and begin + busy_seconds > row_slice.request.due_at:
            *_, lowest, freed_seconds = heappop(heap)
            busy_seconds -= freed_seconds
            dropped.append(lowest)
    return dropped


def _row_seconds(view: SchedulerView, row_slice: RowSlice) -> float:
    points = view.points_for(row_slice)
    return (
        least_seconds(points, view.max_batch_rows) / view.max_batch_rows / max(view.ready_replicas, 1)
        if points
        else 0.0
    )
