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
ANSWER_SECONDS = 0.005
"""How long before the last moment a provisional answer leaves, so that it is not late itself."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Escalation:
    """What is known of looking twice: all rows at one point, then the least certain of them at another.

    Attributes:
        point: the other one.
        below: the confidence that too little is.
        share: of the rows that are less certain.
        accuracy: of all rows together, in the end.
        by_task: the same of single tasks; where there are any, rows of others are not looked at again.
    """

    to: str
    confidence_below: float
    share: float
    accuracy: float
    by_task: Mapping[str, TaskEscalation] = field(default_factory=dict, hash=False)

    @property
    def again(self) -> EscalationRule:
        """It as a departure asks for it."""
        return EscalationRule(self.confidence_below, self.to, self.accuracy, self.share, self.by_task)


@dataclass(frozen=True, slots=True)
class Point:
    """An operating point the plan allows.

    Attributes:
        name: as the model server knows it.
        accuracy: expected of its answers.
        seconds: predicts a batch by its rows, and never falls with them; 0 where nothing is known.
        reads: the inputs its batches take along; None for all.
        accuracy_by_task: expected of rows of these tasks; others have `accuracy`.
        profiled: seconds of batches of 1, 2, … rows as the plan tells them; none where it does not.
        looks: second looks that were measured for rows it has served first.
    """

    name: str
    accuracy: float
    seconds: Callable[[int], float]
    reads: frozenset[str] | None = None
    accuracy_by_task: Mapping[str, float] = field(default_factory=dict)
    profiled: tuple[float, ...] = ()
    looks: tuple[Escalation, ...] = ()

    def accuracy_for(self, task: str) -> float:
        """Expected of rows of a task; of all where it names none."""
        return self.accuracy_by_task.get(task, self.accuracy)

    def reaches(self, work: StageRequest) -> bool:
        """Whether it keeps the floor of its rows."""
        return not work.accuracy_floor or self.accuracy_for(work.wish.task) >= work.accuracy_floor - _ROUNDING

    def suits(self, piece: RowSlice) -> bool:
        """Whether it keeps the floor of these rows, and a second look by it is worth having."""
        before, meant = piece.provisional, piece.again
        if before is not None and meant is not None and meant.accuracy is not None:
            return self.name == meant.point  # on rows that were picked out no other one was measured
        if before is not None and self.accuracy_for(piece.work.wish.task) <= before.accuracy:
            return False
        return self.reaches(piece.work)

    def reads_any_of(self, piece: RowSlice) -> bool:
        """Whether it reads anything of what these rows have."""
        return self.reads is None or any(name in self.reads for name, _ in piece.work.signature)


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
    """What a batch of a stage must keep to, and what it may be made of. Nobody changes it.

    Attributes:
        now: seconds.
        waiting: whose time has not come.
        points: the operating points allowed, preferred first.
        most_rows: of a batch.
        later_seconds: what the stages after this one will take.
        drop_policy: the pipeline's.
        replicas: that could serve.
        free_at: when each replica is expected to be free, those that are now first.
        price: λ, expected right answers that a second of a replica is worth to those who are yet to come.
        mixes: whether one request's rows may go at several points, so that none has to reach the floor alone.
        arrivals_rps: rows a second that have come lately.
        loaded: the operating point that the replica which is free now ran last; empty where it has run none.
    """

    now: float
    waiting: WaitingQueue
    points: Sequence[Point]
    most_rows: int
    later_seconds: float
    drop_policy: DropPolicy
    replicas: int = 1
    free_at: Callable[[], Sequence[float]] = tuple
    price: float = 0.0
    mixes: bool = False
    arrivals_rps: Callable[[], float] = float
    loaded: str = ""

    def points_for(self, piece: RowSlice) -> Sequence[Point]:
        """The points that may serve a slice, preferred first; none where none reaches its floor.

        Those that read an input it lacks are not as accurate for it as they say: they serve it only without others.
        """
        if not piece.work.special and len(self.points) == 1:  # as almost always
            return self.points
        allowed = answerable_from(self.points, piece.work.inputs) or self.points
        suiting = [point for point in allowed if point.suits(piece)]
        return [point for point in suiting if point.reads_any_of(piece)] or suiting[:1]

    def beside(self, head: RowSlice, point: Point) -> BatchCandidates:
        """Who may leave with a slice at a point that suits it, from it on."""
        return self.waiting.batch_candidates(head, point.reads, point.suits)

    def slack_of(self, piece: RowSlice) -> float:
        """Seconds that are left for this stage."""
        return piece.work.due_at - self.now - self.later_seconds

    def drop_time(self, piece: RowSlice) -> float:
        """The moment after which the slice is dropped if it has not left: no point allowed could save it any more.

        Where it has a provisional answer, that one leaves while it is still in time, whatever the pipeline drops.
        """
        points = self.points_for(piece) if piece.work.special and not self.mixes else self.points
        if not points:
            return -NEVER
        policy = "Predicted" if piece.provisional is not None else self.drop_policy
        match policy:
            case "Never":
                return NEVER
            case "Expired":
                return piece.work.deadline
            case "Predicted":
                seconds = least_seconds(points, min(piece.rows, self.most_rows))
                return piece.work.due_at - seconds - self.later_seconds

    def fitting_rows(self, point: Point, head: RowSlice, full: int) -> int:
        """The most rows whose batch ends in time for its most urgent slice, by bisection; 0 where not even one does."""
        if self.drop_policy == "Never":
            return full
        slack = self.slack_of(head)
        if point.seconds(full) <= slack:
            return full
        low, high = 0, full
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if point.seconds(middle) <= slack else (low, middle)
        return low


def answerable_from(points: Sequence[Point], given: Collection[str]) -> list[Point]:
    """Those of the points that read no other inputs than these."""
    return [point for point in points if point.reads is None or all(name in given for name in point.reads)]


def least_seconds(points: Sequence[Point], rows: int) -> float:
    """Seconds of a batch of so many rows at the fastest of these points."""
    if len(points) == 1:  # as almost always, and asked for several times a batch
        return points[0].seconds(rows)
    return min(point.seconds(rows) for point in points)


@dataclass(slots=True)
class Dispatch:
    """A batch leaves. Nobody changes it.

    Attributes:
        point: what it runs at.
        takes: whose rows; the last may be a part of its slice.
        drops: who is dropped.
        again: which of its rows are to be looked at again; None: none.
    """

    point: Point
    takes: Sequence[RowSlice]
    drops: Sequence[RowSlice] = ()
    again: EscalationRule | None = None


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Nothing leaves before this moment, unless more comes; and who is dropped."""

    moment: float = NEVER
    drops: Sequence[RowSlice] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """Decides every departure.

    Attributes:
        decide: one of them.
        falls_back: also to points that are not the plan's first.
        mixes: several points for the rows of one request.
        prepare: told of the points of a new plan and of the rows of its batches, it returns what works out all that
            decisions will look up; None: nothing. That may take most of a second of another thread's time, and
            decisions are made meanwhile.
    """

    decide: Callable[[SchedulerView], Dispatch | WaitUntil]
    falls_back: bool = False
    mixes: bool = False
    prepare: Callable[[Sequence[Point], int], Callable[[], None]] | None = None


def overloaded(view: SchedulerView, company: BatchCandidates, point: Point) -> bool:
    """Whether full batches at this point by all replicas would not get to everybody's rows in time."""
    row_seconds = point.seconds(view.most_rows) / view.most_rows / max(view.replicas, 1)
    start = view.now + view.later_seconds
    return any(start + rows * row_seconds > deadline for deadline, rows in company.due())
