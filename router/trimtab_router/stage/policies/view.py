"""What a policy sees when a replica can take a batch, and what it may answer. Pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, Protocol

from trimtab_router.stage.queue import Beside
from trimtab_router.stage.work import Signature, Slice

DropPolicy = Literal["Predicted", "Past", "Never"]
MOST_SLICES = 4096
"""How far a policy looks: as many slices as the largest batch can have."""
_LOOKED_AT = (0.25, 0.4, 0.55, 0.7, 0.85, 1.0)
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Point:
    """An operating point the plan allows.

    Attributes:
        name: as the model server knows it.
        accuracy: expected of its answers.
        seconds: predicts a batch by its rows, and never falls with them; 0 where nothing is known.
        reads: the inputs its batches take along; None for all.
    """

    name: str
    accuracy: float
    seconds: Callable[[int], float]
    reads: frozenset[str] | None = None

    def suits(self, piece: Slice) -> bool:
        """Whether it reads anything of what these rows have."""
        return self.reads is None or any(name in self.reads for name, _ in piece.work.signature)


class Waiting(Protocol):
    """A queue, to be looked at."""

    def __iter__(self) -> Iterator[Slice]:
        """All that waits, most urgent first."""

    def beside(self, head: Slice, reads: frozenset[str] | None = None) -> Beside:
        """What may share a batch with a slice at a point that reads these inputs."""


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
    """

    now: float
    waiting: Waiting
    points: Sequence[Point]
    most_rows: int
    later_seconds: float
    drop_policy: DropPolicy
    replicas: int = 1

    def slack_of(self, piece: Slice) -> float:
        """Seconds that are left for this stage."""
        return piece.work.deadline - self.now - self.later_seconds

    def drop_time(self, piece: Slice) -> float:
        """The moment after which the slice is dropped if it has not left: no point allowed could save it any more."""
        match self.drop_policy:
            case "Never":
                return NEVER
            case "Past":
                return piece.work.deadline
            case "Predicted":
                seconds = least_seconds(self.points, min(piece.rows, self.most_rows))
                return piece.work.deadline - seconds - self.later_seconds

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


def least_seconds(points: Sequence[Point], rows: int) -> float:
    """Seconds of a batch of so many rows at the fastest of these points."""
    if len(points) == 1:  # as almost always, and asked for several times a batch
        return points[0].seconds(rows)
    return min(point.seconds(rows) for point in points)


@dataclass(frozen=True, slots=True)
class Departure:
    """A batch leaves: at which point, with whose rows (the last may be a part of its slice), and who is dropped."""

    point: Point
    takes: Sequence[Slice]
    drops: Sequence[Slice] = ()


@dataclass(frozen=True, slots=True)
class NotBefore:
    """Nothing leaves before this moment, unless more comes; and who is dropped."""

    moment: float = NEVER
    drops: Sequence[Slice] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """Decides every departure; `falls_back`: also to points that are not the plan's first."""

    decide: Callable[[View], Departure | NotBefore]
    falls_back: bool = False


class Company:
    """Who may leave together: what stands beside the most urgent slice, less those that are dropped before it."""

    __slots__ = ("_beside", "_skipped", "rows")

    def __init__(self, beside: Beside, skipped: int, skipped_rows: int) -> None:
        self.rows = beside.rows - skipped_rows
        self._beside = beside
        self._skipped = skipped

    def first(self, rows: int) -> list[Slice]:
        """The most urgent so many rows; the last slice is split where it must be, and a suspect travels alone."""
        taken: list[Slice] = []
        for there in islice(self._beside, self._skipped, self._skipped + MOST_SLICES):
            if taken and there.alone:
                break
            piece = there if there.rows <= rows else there.first(rows)
            taken.append(piece)
            rows -= piece.rows
            if there.alone or rows <= 0:
                break
        return taken

    def due(self) -> Iterable[tuple[float, float]]:
        """Deadlines in a few places along the queue, and how many rows are due up to each.

        The most patient cannot hide what those before them suffer. The very first are left out: whoever is hopeless
        there is dropped anyway.
        """
        for share in _LOOKED_AT:
            deadline, part = self._beside.deadline_at(share, self._skipped)
            yield deadline, part * self.rows


class Front:
    """Keeps account, along the queue, of who is dropped before the slice that is looked at."""

    def __init__(self, view: View) -> None:
        self.drops: list[Slice] = []
        self._waiting = view.waiting
        self._dropped: dict[Signature, tuple[int, int]] = {}

    def company(self, head: Slice, point: Point) -> Company:
        """Who may leave with the most urgent slice that is not dropped yet."""
        beside = self._waiting.beside(head, point.reads)
        if not self.drops:
            return Company(beside, 0, 0)
        dropped = [self._dropped.get(signature, (0, 0)) for signature in beside.signatures]
        return Company(beside, sum(slices for slices, _ in dropped), sum(rows for _, rows in dropped))

    def drop(self, head: Slice) -> None:
        """Go on without this one."""
        slices, rows = self._dropped.get(head.work.signature, (0, 0))
        self._dropped[head.work.signature] = (slices + 1, rows + head.rows)
        self.drops.append(head)


def overloaded(view: View, company: Company, point: Point) -> bool:
    """Whether full batches at this point by all replicas would not get to everybody's rows in time."""
    row_seconds = point.seconds(view.most_rows) / view.most_rows / max(view.replicas, 1)
    start = view.now + view.later_seconds
    return any(start + rows * row_seconds > deadline for deadline, rows in company.due())
