"""Escalation thresholds on a model's confidence, tested on held-out rows.

A fast point serves all rows; rows below a confidence threshold are escalated to a more accurate point, of the same
variant or of another. Thresholds are not chosen by their mean accuracy, since among many some look good by chance. They
are tested by Learn then Test (Angelopoulos, Bates, Candès, Jordan, Lei 2021, section 4): in a fixed order, from
escalating everything to escalating nothing, each must reject by the exact binomial test that accuracy is below the
floor. The first failure ends the sequence, so all that passed hold together with the confidence of one test.

A single threshold for several tasks would escalate the rows of a task that the first point is bad at, even if the
second point is as bad at it. So each task has its own threshold, and an escalation has a price: the correct responses
it must gain on average. At each price, each task uses the threshold with the largest gain beyond it. A task that gains
nothing has threshold 0.

The results of chosen thresholds are cross-fitted: each half of a task's rows is evaluated with thresholds chosen on the
other half.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.accuracy_floor import binomial_tail
from trimtab_pipelines.escalation import MAX_ESCALATIONS, Escalation, Key, TaskEscalation

CONFIDENCE = 0.95
PRICES = (0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3)
"""Correct responses that an escalation must gain on average."""
THRESHOLDS = (*(step / 100 for step in range(100)), 0.995, 0.998, 0.999, 1.01)
"""Thresholds that are tried; the last escalates all rows. None is 1: rounding decides which sure rows are below it."""
_HALVES_SEED = 23


@dataclass(frozen=True, slots=True, eq=False)
class PairedConfidence:
    """Held-out rows evaluated at two points; neither was trained or tuned on them."""

    confidence: NDArray[np.floating]
    """Of the first point, 0…1. Shape (rows,)."""
    right: NDArray[np.bool_]
    """Whether the first point is correct. Shape (rows,)."""
    right_escalated: NDArray[np.bool_]
    """Whether the second point is correct. Shape (rows,)."""

    def __post_init__(self) -> None:
        if not self.confidence.size == self.right.size == self.right_escalated.size:
            sizes = f"{self.confidence.size}, {self.right.size} and {self.right_escalated.size}"
            raise ValueError(f"confidence, right and right_escalated must be of the same rows; got {sizes}")

    def subset(self, rows: NDArray[np.bool_]) -> "PairedConfidence":
        return PairedConfidence(self.confidence[rows], self.right[rows], self.right_escalated[rows])

    def hits(self, below: float) -> int:
        """Number of correct rows after escalating those below a threshold."""
        return int(np.where(self.confidence < below, self.right_escalated, self.right).sum())


@dataclass(frozen=True, slots=True)
class TaskThreshold:
    """Threshold of one task at one price."""

    below: float
    """Rows with less confidence are escalated; 0 escalates none."""
    share: float
    """Share of rows below the threshold."""
    hits: int
    """Correct rows, cross-fitted."""
    rows: int


ThresholdByTask = Mapping[str, TaskThreshold]
"""Threshold of every task at one price."""


def task_thresholds(by_task: Mapping[str, PairedConfidence]) -> list[ThresholdByTask]:
    """Thresholds at each price, ascending; prices that change no threshold are left out."""
    distinct: list[ThresholdByTask] = []
    for price in PRICES:
        priced = {task: _threshold_at(pairs, price) for task, pairs in by_task.items()}
        if not distinct or any(distinct[-1][task].below != threshold.below for task, threshold in priced.items()):
            distinct.append(priced)
    return distinct


def _threshold_at(pairs: PairedConfidence, price: float) -> TaskThreshold:
    below, rows = best_threshold(pairs, price), pairs.right.size
    half = np.random.default_rng(_HALVES_SEED).permutation(rows) % 2 == 0
    hits = sum(pairs.subset(~fold).hits(best_threshold(pairs.subset(fold), price)) for fold in (half, ~half))
    return TaskThreshold(below, float((pairs.confidence < below).mean()), hits, rows)


def best_threshold(pairs: PairedConfidence, price: float) -> float:
    """Lowest threshold with the largest gain beyond the price of its escalations; 0 if none gains anything.

    The rows, if any, are of one task; the price is in correct responses per escalation.
    """
    order = np.argsort(pairs.confidence, kind="stable")
    gained = pairs.right_escalated[order].astype(np.int64) - pairs.right[order]
    belows = np.array(THRESHOLDS)
    counts = np.searchsorted(pairs.confidence[order], belows, side="left")
    gains = np.concatenate(([0], np.cumsum(gained)))[counts] - price * counts
    return float(belows[int(gains.argmax())])


@dataclass(frozen=True, slots=True)
class EscalationThreshold:
    """A threshold, the share of rows below it, and the accuracy of all rows after escalating these."""

    below: float
    share: float
    accuracy: float


def evaluate_threshold(pairs: PairedConfidence, below: float) -> EscalationThreshold:
    return EscalationThreshold(below, float((pairs.confidence < below).mean()), pairs.hits(below) / pairs.right.size)


def safe_threshold(pairs: PairedConfidence, floor: float, confidence: float = CONFIDENCE) -> EscalationThreshold | None:
    """The lowest threshold at which accuracy is at least the floor for unseen rows, with this confidence.

    None if not even escalating every row keeps the floor, which is above 0 and below 1.
    """
    rows, passed = pairs.confidence.size, None
    for below in reversed(THRESHOLDS):
        threshold = evaluate_threshold(pairs, below)
        hits = round(threshold.accuracy * rows)
        if binomial_tail(hits, rows, floor) > 1.0 - confidence:
            break
        passed = threshold
    return passed


@dataclass(frozen=True, slots=True, eq=False)
class ConfidenceSample:
    """Held-out rows evaluated at one operating point."""

    confidence: NDArray[np.floating]
    """Of each row, 0…1. Shape (rows,)."""
    right: NDArray[np.bool_]
    """Whether each row is correct. Shape (rows,)."""
    inputs: frozenset[str] = frozenset()
    """Inputs that the point reads; empty for all."""
    tasks: NDArray[np.str_] | None = None
    """Task of each row, the same at every point; None without tasks. Shape (rows,)."""


LADDER = tuple(part / 20 for part in range(1, 21))
"""Accuracy floors, as fractions of the proven gain of the second point."""
MIN_GAIN = 0.005
"""Smallest gain in accuracy for which an escalation is recorded."""


def measure_escalations(points: Mapping[str, ConfidenceSample]) -> dict[str, tuple[Escalation, ...]]:
    """Measured escalations between the points of one variant."""
    measured = measure_stage_escalations({("", name): sample for name, sample in points.items()})
    return {name: escalations for (_, name), escalations in measured.items()}


def measure_stage_escalations(
    points: Mapping[Key, ConfidenceSample], confidence: float = CONFIDENCE
) -> dict[Key, tuple[Escalation, ...]]:
    """Measured escalations from each point, at thresholds that keep a ladder of accuracy floors with this confidence.

    Only points that read all inputs of the first point are escalation targets. If both read the same inputs, for
    example a transformer that merges more or fewer tokens, accuracy alone decides. Rows of several tasks have
    thresholds by task. `points` has the same held-out rows at each point of a stage's variants.
    """
    targets = [
        (first, then)
        for first, then in permutations(points, 2)
        if _is_more_accurate(points[then], points[first], confidence)
    ]
    limit = MAX_ESCALATIONS // max(1, *Counter(first for first, _ in targets).values(), 0)
    by_point: dict[Key, tuple[Escalation, ...]] = dict.fromkeys(points, ())
    for first, then in targets:
        sample = points[first]
        pairs = PairedConfidence(sample.confidence, sample.right, points[then].right)
        tasks = [] if sample.tasks is None else np.unique(sample.tasks).tolist()
        by_task = {task: pairs.subset(sample.tasks == task) for task in tasks}
        priced = task_thresholds(by_task) if len(by_task) > 1 else []
        if priced:
            ladder = _ladder_by_task(then[1], pairs, priced, confidence)
        else:
            ladder = (*_ladder(then[1], pairs, confidence), *_beyond_second(then[1], pairs, confidence))
        variant = {"variant": then[0]} if then[0] != first[0] else {}
        by_point[first] += tuple(escalation.replace(**variant) for escalation in ladder[-limit:])
    return by_point


def _is_more_accurate(candidate: ConfidenceSample, base: ConfidenceSample, confidence: float) -> bool:
    """Whether a point reads all inputs of another and is significantly more accurate on the same rows.

    McNemar's test, exact and one-sided: of the rows on which they differ, each would be correct on half by chance.
    """
    if candidate.inputs and not (base.inputs and candidate.inputs >= base.inputs):
        return False
    better, worse = int((candidate.right & ~base.right).sum()), int((base.right & ~candidate.right).sum())
    gain = (better - worse) / candidate.right.size
    return gain >= MIN_GAIN and binomial_tail(better, better + worse, 0.5) <= 1 - confidence


def _ladder(then: str, pairs: PairedConfidence, confidence: float) -> tuple[Escalation, ...]:
    """One escalation for each floor that a threshold keeps; of floors with the same threshold the highest."""
    first, rows = float(pairs.right.mean()), pairs.confidence.size
    by_threshold: dict[float, Escalation] = {}
    for floor in _floors(pairs, confidence):
        threshold = safe_threshold(pairs, floor, confidence)
        if threshold is not None and 0 < threshold.share < 1 and threshold.accuracy >= first + MIN_GAIN:
            by_threshold[threshold.below] = Escalation(
                to=then,
                confidence_below=threshold.below,
                share=round(threshold.share, 4),
                accuracy=round(threshold.accuracy, 4),
                accuracy_low=round(floor - 5e-5, 4),
                samples=rows,
            )
    return tuple(sorted(by_threshold.values(), key=lambda escalation: escalation.confidence_below))


def _beyond_second(then: str, pairs: PairedConfidence, confidence: float) -> Iterator[Escalation]:
    """Escalations that are more accurate than the second point alone, cross-fitted: the two err on different rows."""
    least, rows = int(pairs.right_escalated.sum()), pairs.right.size
    for (threshold,) in reversed([tuple(priced.values()) for priced in task_thresholds({"": pairs})]):
        if threshold.hits > least and threshold.share < 1:
            least = threshold.hits
            yield Escalation(to=then, confidence_below=threshold.below, samples=rows, **_figures(threshold, confidence))


def _floors(pairs: PairedConfidence, confidence: float) -> list[float]:
    """Floors between the accuracies that the first and the second point surely have."""
    rows = pairs.right.size
    low, high = (_lower_bound(int(hits.sum()), rows, confidence) for hits in (pairs.right, pairs.right_escalated))
    return [low + part * (high - low) for part in LADDER]


def _ladder_by_task(
    then: str, pairs: PairedConfidence, priced: Sequence[ThresholdByTask], confidence: float
) -> tuple[Escalation, ...]:
    """`_ladder` with thresholds by task; the fixed order is that of rising prices of an escalation.

    Each floor is tested on cross-fitted results, since the thresholds were chosen by their gain.
    """
    rows, first = pairs.right.size, float(pairs.right.mean())
    hits = [sum(threshold.hits for threshold in thresholds.values()) for thresholds in priced]
    by_price: dict[int, Escalation] = {}
    for floor in _floors(pairs, confidence):
        failures = (index for index, right in enumerate(hits) if binomial_tail(right, rows, floor) > 1 - confidence)
        last = next(failures, len(hits)) - 1
        if last >= 0 and hits[last] / rows >= first + MIN_GAIN:
            by_price[last] = _escalation_by_task(then, pairs, priced[last], floor, confidence)
    ladder = (escalation for _, escalation in sorted(by_price.items(), reverse=True))
    return tuple(escalation for escalation in ladder if 0 < escalation.share < 1)


def _escalation_by_task(
    then: str, pairs: PairedConfidence, thresholds: ThresholdByTask, floor: float, confidence: float
) -> Escalation:
    rows = pairs.right.size
    share = sum(threshold.share * threshold.rows for threshold in thresholds.values()) / rows
    return Escalation(
        to=then,
        confidence_below=round(float(np.quantile(pairs.confidence, share)), 4),
        share=round(share, 4),
        accuracy=round(sum(threshold.hits for threshold in thresholds.values()) / rows, 4),
        accuracy_low=round(floor - 5e-5, 4),
        samples=rows,
        by_task={task: _task_escalation(threshold, confidence) for task, threshold in thresholds.items()},
    )


def _task_escalation(threshold: TaskThreshold, confidence: float) -> TaskEscalation:
    return TaskEscalation(confidence_below=threshold.below, **_figures(threshold, confidence))


def _figures(threshold: TaskThreshold, confidence: float) -> dict[str, Any]:
    low = _lower_bound(threshold.hits, threshold.rows, confidence)
    accuracy = round(threshold.hits / threshold.rows, 4)
    return {"share": round(threshold.share, 4), "accuracy": accuracy, "accuracy_low": round(max(low - 5e-5, 0.0), 4)}


def _lower_bound(hits: int, rows: int, confidence: float) -> float:
    """Lower confidence bound of the binomial proportion, by bisection."""
    low, high = 0.0, hits / rows
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if middle > 0 and binomial_tail(hits, rows, middle) <= 1 - confidence else (low, middle)
        )
    return low
