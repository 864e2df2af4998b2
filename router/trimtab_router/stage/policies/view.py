"""What a policy sees when a replica can take a batch, and what it may answer. Pure.

The contract, for whoever writes a policy:

- `View.waiting` yields what waits, most urgent first; `beside` gives what may leave with a slice. Nothing is changed by
  looking. A slice says its rows, its deadline (`work.deadline`, of the whole request, and `work.due_at`, less what a
  long prompt takes; `View.slack_of` is what is left for this stage), what its request wishes (`work.wish`), how
  accurate this stage must be for it (`work.accuracy_floor`), which inputs are there (`work.signature`), and, where its
  rows have an answer already, how they got it (`provisional`) and what was meant for them (`again`).
- A point may serve a slice if it `suits` it: it reaches the floor for the slice's task, and a second look is only worth
  having from a more accurate point than the first. `View.points_for` are those; where there are none the desk drops the
  slice with that reason, or lets its provisional answer stand.
- A policy that mixes points over the rows of one request keeps the floor for their mean; the desk checks no floors.
- It answers with one departure, or with `NotBefore`: nothing leaves before that moment. Both may name slices to be
  dropped. `NotBefore(view.now, drops)` means: drop these, then ask again. Of a dropped slice that has a provisional
  answer this answer stands; a request loses all its rows with any other.
- `Departure.again` sends rows back that the model is not certain of, where the stage declares a certainty. The answer
  they have stands if no better one comes before their deadline.
- What is worth least goes first in overload: `least_valuable` says who.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from trimtab_pipelines.second_look import TaskLook
from trimtab_router.stage.queue import Company
from trimtab_router.stage.work import Again, Slice, Work

DropPolicy = Literal["Predicted", "Past", "Never"]
NEVER = float("inf")
ANSWER_SECONDS = 0.005
"""How long before the last moment a provisional answer leaves, so that it is not late itself."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class SecondLook:
    """What is known of looking twice: all rows at one point, then the least certain of them at another.

    Attributes:
        point: the other one.
        below: the certainty that too little is.
        share: of the rows that are less certain.
        accuracy: of all rows together, in the end.
        by_task: the same of single tasks; where there are any, rows of others are not looked at again.
    """

    point: str
    below: float
    share: float
    accuracy: float
    by_task: Mapping[str, TaskLook] = field(default_factory=dict, hash=False)

    @property
    def again(self) -> Again:
        """It as a departure asks for it."""
        return Again(self.below, self.point, self.accuracy, self.share, self.by_task)


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
    looks: tuple[SecondLook, ...] = ()

    def accuracy_for(self, task: str) -> float:
        """Expected of rows of a task; of all where it names none."""
        return self.accuracy_by_task.get(task, self.accuracy)

    def reaches(self, work: Work) -> bool:
        """Whether it keeps the floor of its rows."""
        return not work.accuracy_floor or self.accuracy_for(work.wish.task) >= work.accuracy_floor - _ROUNDING

    def suits(self, piece: Slice) -> bool:
        """Whether it keeps the floor of these rows, and a second look by it is worth having."""
        before, meant = piece.provisional, piece.again
        if before is not None and meant is not None and meant.accuracy is not None:
            return self.name == meant.point  # on rows that were picked out no other one was measured
        if before is not None and self.accuracy_for(piece.work.wish.task) <= before.accuracy:
            return False
        return self.reaches(piece.work)

    def reads_any_of(self, piece: Slice) -> bool:
        """Whether it reads anything of what these rows have."""
        return self.reads is None or any(name in self.reads for name, _ in piece.work.signature)


class Waiting(Protocol):
    """A queue, to be looked at."""

    special_rows: int
    """Rows that not every point may serve, or that are worth more or less than others; 0 where all are alike."""

    def __iter__(self) -> Iterator[Slice]:
        """All that waits, most urgent first."""

    def beside(
        self, head: Slice, reads: frozenset[str] | None = None, suits: Callable[[Slice], bool] | None = None
    ) -> Company:
        """What may share a batch with a slice, from it on, at a point that reads these inputs and suits these rows."""


@dataclass(slots=True, eq=False)  # not frozen, which costs as much as all else about making one
class View:
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
    waiting: Waiting
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

    def points_for(self, piece: Slice) -> Sequence[Point]:
        """The points that may serve a slice, preferred first; none where none reaches its floor.

        Those that read an input it lacks are not as accurate for it as they say: they serve it only without others.
        """
        if not piece.work.special and len(self.points) == 1:  # as almost always
            return self.points
        allowed = reading_only(self.points, piece.work.inputs) or self.points
        suiting = [point for point in allowed if point.suits(piece)]
        return [point for point in suiting if point.reads_any_of(piece)] or suiting[:1]

    def beside(self, head: Slice, point: Point) -> Company:
        """Who may leave with a slice at a point that suits it, from it on."""
        return self.waiting.beside(head, point.reads, point.suits)

    def slack_of(self, piece: Slice) -> float:
        """Seconds that are left for this stage."""
        return piece.work.due_at - self.now - self.later_seconds

    def drop_time(self, piece: Slice) -> float:
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
            case "Past":
                return piece.work.deadline
            case "Predicted":
                seconds = least_seconds(points, min(piece.rows, self.most_rows))
                return piece.work.due_at - seconds - self.later_seconds

    def fitting_rows(self, point: Point, head: Slice, full: int) -> int:
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


def reading_only(points: Sequence[Point], given: Collection[str]) -> list[Point]:
    """Those of the points that read no other inputs than these."""
    return [point for point in points if point.reads is None or all(name in given for name in point.reads)]


def least_seconds(points: Sequence[Point], rows: int) -> float:
    """Seconds of a batch of so many rows at the fastest of these points."""
    if len(points) == 1:  # as almost always, and asked for several times a batch
        return points[0].seconds(rows)
    return min(point.seconds(rows) for point in points)


@dataclass(slots=True)
class Departure:
    """A batch leaves. Nobody changes it.

    Attributes:
        point: what it runs at.
        takes: whose rows; the last may be a part of its slice.
        drops: who is dropped.
        again: which of its rows are to be looked at again; None: none.
    """

    point: Point
    takes: Sequence[Slice]
    drops: Sequence[Slice] = ()
    again: Again | None = None


@dataclass(frozen=True, slots=True)
class NotBefore:
    """Nothing leaves before this moment, unless more comes; and who is dropped."""

    moment: float = NEVER
    drops: Sequence[Slice] = ()


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

    decide: Callable[[View], Departure | NotBefore]
    falls_back: bool = False
    mixes: bool = False
    prepare: Callable[[Sequence[Point], int], Callable[[], None]] | None = None


def overloaded(view: View, company: Company, point: Point) -> bool:
    """Whether full batches at this point by all replicas would not get to everybody's rows in time."""
    row_seconds = point.seconds(view.most_rows) / view.most_rows / max(view.replicas, 1)
    start = view.now + view.later_seconds
    return any(start + rows * row_seconds > deadline for deadline, rows in company.due())
