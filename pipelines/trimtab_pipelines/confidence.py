"""Looking twice at what a model is not certain of: what that keeps, and from which confidence on it need not. Pure.

A cheap point answers all rows; those it is less certain of than a threshold are answered again by a better one. Which
threshold will do is not read off a mean: among so many some look good by chance. It is tested, as Learn then Test does
(Angelopoulos, Bates, Candès, Jordan, Lei 2021, section 4): thresholds stand in an order fixed before, from those that
look again at everything to those that look at nothing, and each must reject, by the exact binomial, that accuracy is
below the floor. The first that does not ends it. So all that passed hold together with the confidence of one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.accuracy_floor import binomial_tail
from trimtab_pipelines.escalation import MAX_ESCALATIONS, Escalation, TaskEscalation
from trimtab_pipelines.task_thresholds import STEPS, PairedAnswers, TaskThreshold, ThresholdByTask, task_thresholds

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, eq=False)
class PairedConfidence:
    """Held-out rows that were seen at both points, none of which either was trained or tuned on.

    Attributes:
        confidence: of the cheap point, 0…1. Shape (rows,).
        right: whether the cheap point was. Shape (rows,).
        right_escalated: whether the better point was. Shape (rows,).
        tasks: which task each is of, where several are mixed and each has a threshold of its own. Shape (rows,).
    """

    confidence: NDArray[np.floating]
    right: NDArray[np.bool_]
    right_escalated: NDArray[np.bool_]
    tasks: NDArray[np.str_] | None = None

    def __post_init__(self) -> None:
        if not self.confidence.size == self.right.size == self.right_escalated.size > 0:
            sizes = f"{self.confidence.size}, {self.right.size} and {self.right_escalated.size}"
            raise ValueError(
                f"confidence, right and right_escalated must be of the same rows, at least one; got {sizes}"
            )
        if self.tasks is not None and self.tasks.size != self.right.size:
            raise ValueError(f"tasks must be of the same rows; got {self.tasks.size} of {self.right.size}")

    @property
    def by_task(self) -> dict[str, PairedAnswers]:
        """The rows of each task; none where tasks are not told apart."""
        whole = PairedAnswers(self.confidence, self.right, self.right_escalated)
        return (
            {} if self.tasks is None else {str(task): whole.only(self.tasks == task) for task in np.unique(self.tasks)}
        )


@dataclass(frozen=True, slots=True)
class EscalationThreshold:
    """A threshold: which share of rows is less certain than `below`, and the accuracy of all if these go again."""

    below: float
    share: float
    accuracy: float


def escalation_curve(looks: PairedConfidence, shares: Sequence[float]) -> list[EscalationThreshold]:
    """The accuracy kept when the least certain share of the rows is answered again.

    Args:
        looks: held-out rows.
        shares: 0…1.
    """
    order = np.argsort(looks.confidence, kind="stable")
    known = looks.confidence[order]
    first, again = looks.right[order], looks.right_escalated[order]
    found = []
    for share in shares:
        count = round(share * known.size)
        below = float(known[count]) if count < known.size else 1.0 + 1.0 / STEPS
        hits = int(again[:count].sum() + first[count:].sum())
        found.append(EscalationThreshold(below, count / known.size, hits / known.size))
    return found


def evaluate_threshold(looks: PairedConfidence, below: float) -> EscalationThreshold:
    """What a threshold does on held-out rows."""
    doubted = looks.confidence < below
    right = np.where(doubted, looks.right_escalated, looks.right)
    return EscalationThreshold(below, float(doubted.mean()), float(right.mean()))


def safe_threshold(looks: PairedConfidence, floor: float, confidence: float = CONFIDENCE) -> EscalationThreshold | None:
    """The lowest threshold at which accuracy is at least the floor, with this confidence.

    Args:
        looks: held-out rows.
        floor: above 0 and below 1.
        confidence: that it holds for rows of the same kind that nobody has seen yet.

    Returns:
        The threshold; None where not even looking at everything again is that surely good enough.
    """
    rows, passed = looks.confidence.size, None
    for step in range(STEPS + 1, -1, -1):  # above 1: all rows go again
        look = evaluate_threshold(looks, step / STEPS)
        hits = round(look.accuracy * rows)
        if binomial_tail(hits, rows, floor) > 1.0 - confidence:
            break
        passed = look
    return passed


@dataclass(frozen=True, slots=True, eq=False)
class ConfidenceSample:
    """Held-out rows as one operating point sees them.

    Attributes:
        confidence: of each row, 0…1. Shape (rows,).
        right: whether it was. Shape (rows,).
        reads: the inputs it reads; empty for all.
        tasks: which task each row is of, the same at every point; None where they are not told apart. Shape (rows,).
    """

    confidence: NDArray[np.floating]
    right: NDArray[np.bool_]
    inputs: frozenset[str] = frozenset()
    tasks: NDArray[np.str_] | None = None


LADDER = tuple(part / 20 for part in range(1, 21))
"""Of what the better point is surely more accurate, which part each floor asks for."""
MIN_GAIN = 0.005
"""Of accuracy, below which a second look is not worth a place in a document."""


def escalations(
    points: Mapping[str, ConfidenceSample], confidence: float = CONFIDENCE
) -> dict[str, tuple[Escalation, ...]]:
    """Return what looking again is worth from each point, at thresholds that keep a ladder of floors.

    Only points that read all that the first reads look again: a row that is doubted needs more senses, not others.
    Where both read the same, such as one transformer that merges more or fewer tokens, accuracy alone decides.
    Rows of several tasks have thresholds by task.

    Args:
        points: the same held-out rows, as each point of a variant sees them.
        confidence: with which each floor holds for rows that nobody has seen yet.
    """
    pairs = [
        (first, then)
        for first, then in permutations(points, 2)
        if _is_more_accurate(points[then], points[first], confidence)
    ]
    most = MAX_ESCALATIONS // max(1, *Counter(first for first, _ in pairs).values(), 0)
    found: dict[str, tuple[Escalation, ...]] = dict.fromkeys(points, ())
    for first, then in pairs:
        seen = points[first]
        looks = PairedConfidence(seen.confidence, seen.right, points[then].right, seen.tasks)
        by_task = looks.by_task
        priced = task_thresholds(by_task) if len(by_task) > 1 else []
        ladder = _ladder_by_task(then, looks, priced, confidence) if priced else _ladder(then, looks, confidence)
        found[first] += ladder[-most:]
    return found


def _is_more_accurate(one: ConfidenceSample, other: ConfidenceSample, confidence: float) -> bool:
    """Whether a point reads all that another does, and is right more often on the very same rows, not by chance.

    By chance: of the rows on which they differ, each would be right on half (McNemar's test, exact and one-sided).
    """
    if one.inputs and not (other.inputs and one.inputs >= other.inputs):
        return False
    better, worse = int((one.right & ~other.right).sum()), int((other.right & ~one.right).sum())
    gain = (better - worse) / one.right.size
    return gain >= MIN_GAIN and binomial_tail(better, better + worse, 0.5) <= 1 - confidence


def _ladder(then: str, looks: PairedConfidence, confidence: float) -> tuple[Escalation, ...]:
    """One second look for each floor that a threshold keeps; of floors with the same threshold the highest."""
    first, rows = float(looks.right.mean()), looks.confidence.size
    kept: dict[float, Escalation] = {}
    for floor in _floors(looks, confidence):
        look = safe_threshold(looks, floor, confidence)
        if look is not None and 0 < look.share < 1 and look.accuracy >= first + MIN_GAIN:
            kept[look.below] = Escalation(
                to=then,
                confidence_below=look.below,
                share=round(look.share, 4),
                accuracy=round(look.accuracy, 4),
                accuracy_low=round(floor - 5e-5, 4),
                samples=rows,
            )
    return tuple(sorted(kept.values(), key=lambda look: look.confidence_below))


def _floors(looks: PairedConfidence, confidence: float) -> list[float]:
    """From what the first point surely has to what the better one surely has."""
    rows = looks.right.size
    least, most = (_lower_bound(int(hits.sum()), rows, confidence) for hits in (looks.right, looks.right_escalated))
    return [least + part * (most - least) for part in LADDER]


def _ladder_by_task(
    then: str, looks: PairedConfidence, priced: Sequence[ThresholdByTask], confidence: float
) -> tuple[Escalation, ...]:
    """As `_ladder`, with thresholds by task: the order fixed before is that of the price of a look, rising from none.

    Each floor is tested on cross-fitted answers, since the thresholds were chosen by what they win.
    """
    rows, first = looks.right.size, float(looks.right.mean())
    hits = [sum(one.hits for one in each.values()) for each in priced]
    kept: dict[int, Escalation] = {}
    for floor in _floors(looks, confidence):
        fails = (place for place, right in enumerate(hits) if binomial_tail(right, rows, floor) > 1 - confidence)
        dearest = next(fails, len(hits)) - 1
        if dearest >= 0 and hits[dearest] / rows >= first + MIN_GAIN:
            kept[dearest] = _escalation_by_task(then, looks, priced[dearest], floor, confidence)
    return tuple(look for _, look in sorted(kept.items(), reverse=True) if 0 < look.share < 1)


def _escalation_by_task(
    then: str, looks: PairedConfidence, doubt: ThresholdByTask, floor: float, confidence: float
) -> Escalation:
    rows = looks.right.size
    share = sum(one.share * one.rows for one in doubt.values()) / rows
    return Escalation(
        to=then,
        confidence_below=round(float(np.quantile(looks.confidence, share)), 4),
        share=round(share, 4),
        accuracy=round(sum(one.hits for one in doubt.values()) / rows, 4),
        accuracy_low=round(floor - 5e-5, 4),
        samples=rows,
        by_task={task: _task_escalation(one, confidence) for task, one in doubt.items()},
    )


def _task_escalation(doubt: TaskThreshold, confidence: float) -> TaskEscalation:
    return TaskEscalation(
        confidence_below=doubt.below,
        share=round(doubt.share, 4),
        accuracy=round(doubt.hits / doubt.rows, 4),
        accuracy_low=round(max(_lower_bound(doubt.hits, doubt.rows, confidence) - 5e-5, 0.0), 4),
    )


def _lower_bound(hits: int, rows: int, confidence: float) -> float:
    """The highest floor that so many hits reject being below, by bisection: the binomial's lower bound."""
    low, high = 0.0, hits / rows
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if middle > 0 and binomial_tail(hits, rows, middle) <= 1 - confidence else (low, middle)
        )
    return low
