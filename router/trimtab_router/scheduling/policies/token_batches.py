"""What waits, gathered into batches by deadline and utility. Pure.

Rows of about the same utility go into one batch, so that a batch which cannot be served in time is one of little worth;
tasks mix. The most urgent rows are gathered into small batches, which the schedule may join, those behind into full
ones: so the size of the next batch is chosen together with its operating point.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from math import log2

from trimtab_router.scheduling.policies.interface import ANSWER_SECONDS, SchedulerView
from trimtab_router.scheduling.queue import MOST_SLICES
from trimtab_router.scheduling.stage_request import EscalationRule, RowSlice, Signature

URGENCY = 30.0
"""How many answers of one priority are worth one of the next higher."""
_Company = tuple[Signature, float, str, EscalationRule | None]


@dataclass(slots=True, eq=False)
class CandidateBatch:
    """Rows that are planned as one batch.

    Attributes:
        company: what all that go together with it have in common.
        deadline: by which this stage must be done with the first.
        slices: of which it is, most urgent first; of the last maybe not all.
        rows: of all.
        weights: what right answers to all its rows are worth, by task.
        known: what the answers they have are worth, as far as they are expected to be right.
    """

    company: _Company
    deadline: float
    level: int
    slices: list[RowSlice] = field(default_factory=list)
    rows: int = 0
    weights: dict[str, float] = field(default_factory=dict)
    known: float = 0.0

    def add(self, piece: RowSlice, rows: int, weight: float) -> None:
        """So many rows more, each worth that much."""
        task = piece.work.wish.task
        self.slices.append(piece)
        self.rows += rows
        self.weights[task] = self.weights.get(task, 0.0) + weight * rows
        if piece.provisional is not None:
            self.known += weight * rows * piece.provisional.accuracy

    def joined(self, other: "CandidateBatch") -> "CandidateBatch":
        """Both as one."""
        weights = {
            task: self.weights.get(task, 0.0) + other.weights.get(task, 0.0)
            for task in {**self.weights, **other.weights}
        }
        slices = [*self.slices, *other.slices]
        return CandidateBatch(
            self.company,
            min(self.deadline, other.deadline),
            self.level,
            slices,
            self.rows + other.rows,
            weights,
            self.known + other.known,
        )

    def goes_with(self, other: "CandidateBatch", most_rows: int) -> bool:
        """Whether both may be one batch."""
        alone = self.slices[0].alone or other.slices[0].alone
        return not alone and self.company == other.company and self.rows + other.rows <= most_rows


def batches_of(view: SchedulerView, most: int, *, small: bool = True) -> list[CandidateBatch]:
    """The first batches along the queue, by the deadlines of their first.

    Args:
        view: what waits.
        most: how many.
        small: whether the first are small ones.
    """
    quarter = max(view.most_rows // 4, 1)
    sizes = (1, quarter, quarter, min(2 * quarter, view.most_rows), view.most_rows) if small else (view.most_rows,)
    found: list[CandidateBatch] = []
    open_batches: dict[tuple[_Company, int], tuple[CandidateBatch, int]] = {}
    for piece in islice(view.waiting, MOST_SLICES):
        work, wish = piece.work, piece.work.wish
        weight, level = utility_class(wish.utility, wish.priority)
        company = (work.signature, work.accuracy_floor, wish.task if work.accuracy_floor else "", piece.again)
        mate, room = open_batches.get((company, level), (None, 0))
        if mate is not None and mate.rows + piece.rows <= room and not piece.alone:
            mate.add(piece, piece.rows, weight)
            continue
        deadline = work.due_at - view.later_seconds - (ANSWER_SECONDS if piece.provisional is not None else 0.0)
        for rows in _parts(piece.rows, view.most_rows):
            if len(found) == most:
                return found
            found.append(CandidateBatch(company, deadline, level))
            found[-1].add(piece, rows, weight)
        if not piece.alone:
            open_batches[company, level] = (found[-1], sizes[min(len(found), len(sizes)) - 1])
    return found


@lru_cache(maxsize=1024)
def utility_class(utility: float, priority: int) -> tuple[float, int]:
    """What a right answer is worth, and the power of two nearest to that."""
    weight = utility * URGENCY ** (3 - priority)
    return weight, round(log2(max(weight, 1e-9)))


def _parts(rows: int, most: int) -> Iterator[int]:
    while rows > 0:
        yield min(rows, most)
        rows -= most
