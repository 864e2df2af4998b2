"""Interface of a scheduling policy: what it sees when a replica has capacity, and what it may return.

The contract for a policy's author:

- `SchedulerView.waiting` yields the queued row slices by deadline; `batch_candidates` yields the slices that may share
  a batch with one. Iterating changes nothing. A slice has its rows, its deadline (`work.deadline` for the whole
  request; `work.due_at` subtracts the prefill of a long prompt; `SchedulerView.slack_of` is the slack of this stage),
  its request options (`work.wish`), the accuracy that this stage must reach for it (`work.accuracy_floor`), its inputs
  (`work.signature`) and, for rows that await escalation, how they were served (`provisional`) and the rule (`again`).
- A point may serve a slice if it `suits` the slice: it reaches the floor for the slice's task, and an escalation goes
  to a point that is more accurate than the first. `SchedulerView.points_for` lists these points. If there are none, the
  scheduler drops the slice with that reason, or keeps its provisional response.
- A policy that mixes points over the rows of one request keeps the mean above the floor; the scheduler checks no floor.
- A policy returns one `Dispatch`, or `WaitUntil`: no batch is dispatched before that moment. Both may name slices to
  drop. `WaitUntil(view.now, drops)` drops these slices and asks the policy again. A dropped slice keeps its provisional
  response if it has one; any other request loses all its rows.
- `Dispatch.again` returns low-confidence rows to the queue, if the stage declares a confidence output. Their response
  stands if no better one arrives before their deadline.
- In overload, the slices of least value are dropped first: see `first_to_drop`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from trimtab_pipelines.escalation import TaskEscalation
from trimtab_router.scheduling.queue import BatchCandidates
from trimtab_router.scheduling.stage_request import EscalationRule, RowSlice, StageRequest

DropPolicy = Literal["Predicted", "Expired", "Never"]
NEVER = float("inf")
RESPONSE_MARGIN_SECONDS = 0.005
"""How long before the last moment a provisional answer leaves, so that it is not late itself."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Escalation:
    """What is known of looking twice: all rows at one point, then the least certain of them at another."""

    to: str
    confidence_below: float
    share: float
    """Of the rows that are less certain."""
    accuracy: float
    """Of all rows together, in the end."""
    by_task: Mapping[str, TaskEscalation] = field(default_factory=dict, hash=False)
    """The same of single tasks; where there are any, rows of others are not looked at again."""

    @property
    def rule(self) -> EscalationRule:
        """It as a departure asks for it."""
        return EscalationRule(self.confidence_below, self.to, self.accuracy, self.share, self.by_task)


@dataclass(frozen=True, slots=True)
class Point:
    """An operating point the plan allows."""

    name: str
    """As the model server knows it."""
    accuracy: float
    """Expected of its answers."""
    seconds: Callable[[int], float]
    """Predicts a batch by its rows, and never falls with them; 0 where nothing is known."""
    inputs: frozenset[str] | None = None
    """The inputs its batches take along; None for all."""
    accuracy_by_task: Mapping[str, float] = field(default_factory=dict)
    """Expected of rows of these tasks; others have `accuracy`."""
    profiled: tuple[float, ...] = ()
    """Seconds of batches of 1, 2, … rows as the plan tells them; none where it does not."""
    escalations: tuple[Escalation, ...] = ()
    """Second looks that were measured for rows it has served first."""

    def accuracy_for(self, task: str) -> float:
        """Expected of rows of a task; of all where it names none."""
        return self.accuracy_by_task.get(task, self.accuracy)

    def reaches(self, request: StageRequest) -> bool:
        """Whether it keeps the floor of its rows."""
        return (
            not request.accuracy_floor or self.accuracy_for(request.options.task) >= request.accuracy_floor - _ROUNDING
        )

    def suits(self, row_slice: RowSlice) -> bool:
        """Whether it keeps the floor of these rows, and a second look by it is worth having."""
        provisional, escalation = row_slice.provisional_response, row_slice.escalation
        if provisional is not None and escalation is not None and escalation.accuracy is not None:
            return self.name == escalation.to  # on rows that were picked out no other one was measured
        if provisional is not None and self.accuracy_for(row_slice.request.options.task) <= provisional.accuracy:
            return False
        return self.reaches(row_slice.request)

    def uses_any_input_of(self, row_slice: RowSlice) -> bool:
        """Whether it reads anything of what these rows have."""
        return self.inputs is None or any(name in self.inputs for name, _ in row_slice.request.signature)


class WaitingQueue(Protocol):
    """A queue, to be looked at."""

    special_rows: int
    """Rows that not every point may serve, or that are worth more or less than others; 0 where all are alike."""

    def __iter__(self) -> Iterator[RowSlice]:
        """All that waits, most urgent first."""

    def batch_candidates(
        self, head: RowSlice, reads: frozenset[str] | None = None, suits: Callable[[RowSlice], bool] | None = None
    ) -> BatchCandidates:
        """What may share a batch with a slice, from it on, at a point that reads these inputs and suits these rows."""


@dataclass(slots=True, eq=False)  # not frozen, which costs as much as all else about making one
class SchedulerView:
    """What a batch of a stage must keep to, and what it may be made of. Nobody changes it."""

    now: float
    """Seconds."""
    waiting: WaitingQueue
    """Whose time has not come."""
    points: Sequence[Point]
    """The operating points allowed, preferred first."""
    max_batch_rows: int
    """Of a batch."""
    later_seconds: float
    """What the stages after this one will take."""
    drop_policy: DropPolicy
    """The pipeline's."""
    ready_replicas: int = 1
    """That could serve."""
    free_at: Callable[[], Sequence[float]] = tuple
    """When each replica is expected to be free, those that are now first."""
    shadow_price: float = 0.0
    """Λ, expected right answers that a second of a replica is worth to those who are yet to come."""
    mixes_points: bool = False
    """Whether one request's rows may go at several points, so that none has to reach the floor alone."""
    arrivals_rps: Callable[[], float] = float
    """Rows a second that have come lately."""
    loaded_point: str = ""
    """The operating point that the replica which is free now ran last; empty where it has run none."""

    def points_for(self, row_slice: RowSlice) -> Sequence[Point]:
        """The points that may serve a slice, preferred first; none where none reaches its floor.

        Those that read an input it lacks are not as accurate for it as they say: they serve it only without others.
        """
        if not row_slice.request.special and len(self.points) == 1:  # as almost always
            return self.points
        allowed = answerable_from(self.points, row_slice.request.inputs) or self.points
        suiting = [point for point in allowed if point.suits(row_slice)]
        return [point for point in suiting if point.uses_any_input_of(row_slice)] or suiting[:1]

    def candidates(self, head: RowSlice, point: Point) -> BatchCandidates:
        """Who may leave with a slice at a point that suits it, from it on."""
        return self.waiting.batch_candidates(head, point.inputs, point.suits)

    def slack_seconds(self, row_slice: RowSlice) -> float:
        """Seconds that are left for this stage."""
        return row_slice.request.due_at - self.now - self.later_seconds

    def drop_time(self, row_slice: RowSlice) -> float:
        """The moment after which the slice is dropped if it has not left: no point allowed could save it any more.

        Where it has a provisional answer, that one leaves while it is still in time, whatever the pipeline drops.
        """
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
                return row_slice.request.due_at - seconds - self.later_seconds

    def fitting_rows(self, point: Point, head: RowSlice, full: int) -> int:
        """The most rows whose batch ends in time for its most urgent slice, by bisection; 0 where not even one does."""
        if self.drop_policy == "Never":
            return full
        slack = self.slack_seconds(head)
        if point.seconds(full) <= slack:
            return full
        low, high = 0, full
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if point.seconds(middle) <= slack else (low, middle)
        return low


def answerable_from(points: Sequence[Point], given: Collection[str]) -> list[Point]:
    """Those of the points that read no other inputs than these."""
    return [point for point in points if point.inputs is None or all(name in given for name in point.inputs)]


def least_seconds(points: Sequence[Point], rows: int) -> float:
    """Seconds of a batch of so many rows at the fastest of these points."""
    if len(points) == 1:  # as almost always, and asked for several times a batch
        return points[0].seconds(rows)
    return min(point.seconds(rows) for point in points)


@dataclass(slots=True)
class Dispatch:
    """A batch leaves. Nobody changes it."""

    point: Point
    """What it runs at."""
    row_slices: Sequence[RowSlice]
    """Whose rows; the last may be a part of its slice."""
    drops: Sequence[RowSlice] = ()
    """Who is dropped."""
    escalation: EscalationRule | None = None
    """Which of its rows are to be looked at again; None: none."""


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Nothing leaves before this moment, unless more comes; and who is dropped."""

    time: float = NEVER
    drops: Sequence[RowSlice] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """Decides every departure."""

    decide: Callable[[SchedulerView], Dispatch | WaitUntil]
    """One of them."""
    uses_fallbacks: bool = False
    """Also to points that are not the plan's first."""
    mixes_points: bool = False
    """Several points for the rows of one request."""
    prepare: Callable[[Sequence[Point], int], Callable[[], None]] | None = None
    """Told of the points of a new plan and of the rows of its batches, it returns what works out all that decisions
    will look up; None: nothing. That may take most of a second of another thread's time, and decisions are made
    meanwhile."""


def overloaded(view: SchedulerView, candidates: BatchCandidates, point: Point) -> bool:
    """Whether full batches at this point by all replicas would not get to everybody's rows in time."""
    row_seconds = point.seconds(view.max_batch_rows) / view.max_batch_rows / max(view.ready_replicas, 1)
    start = view.now + view.later_seconds
    return any(start + rows * row_seconds > deadline for deadline, rows in candidates.due())
