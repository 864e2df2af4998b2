"""Accuracy of an escalation on rows that choose no threshold, in the unit of its stage's accuracy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.accuracy_evidence import wilson_interval
from trimtab_pipelines.escalation import Escalation, Key
from trimtab_pipelines.escalation_pruning import undominated_escalations
from trimtab_pipelines.escalation_thresholds import ConfidenceSample, measure_stage_escalations


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRows:
    """Rows served at one operating point. A row, such as a page, may have several expected results."""

    confidence: NDArray[np.floating]
    """Of each row, 0…1. Shape (rows,)."""
    correct: NDArray[np.integer]
    """Correct results of each row. Shape (rows,)."""
    total: NDArray[np.integer]
    """Expected results of each row; 0 if its truth is unknown. Shape (rows,)."""
    inputs: frozenset[str] = frozenset()
    """Inputs that the point reads; empty for all."""

    @property
    def accuracy(self) -> float:
        return float(self.correct.sum() / self.total.sum())

    def subset(self, rows: NDArray[np.bool_]) -> "ScoredRows":
        return ScoredRows(self.confidence[rows], self.correct[rows], self.total[rows], self.inputs)

    @classmethod
    def concatenate(cls, parts: Sequence["ScoredRows"]) -> "ScoredRows":
        columns = zip(*((part.confidence, part.correct, part.total) for part in parts), strict=True)
        confidence, correct, total = map(np.concatenate, columns)
        return cls(confidence, correct, total)

    def sample(self) -> ConfidenceSample:
        """Rows of known truth with whether all of their results are correct, which choose thresholds."""
        known = self.total > 0
        return ConfidenceSample(self.confidence[known], (self.correct == self.total)[known], self.inputs)

    def escalated(self, then: "ScoredRows", below: float) -> "ScoredRows":
        """The rows after those below a threshold were served at another point."""
        low = self.confidence < below
        correct, total = np.where(low, then.correct, self.correct), np.where(low, then.total, self.total)
        return ScoredRows(self.confidence, correct, total)


def effective_samples(correct: NDArray[np.integer], total: NDArray[np.integer]) -> float:
    """Equivalent number of independent results of samples with several correlated ones each.

    By the variance of a ratio estimator (Cochran, Sampling Techniques, 1977, section 6.3).
    """
    results = float(total.sum())
    if correct.size < 2 or not 0 < correct.sum() < results:
        return min(float(correct.size), results)
    share = float(correct.sum()) / results
    variance = float(np.square(correct - share * total).sum()) / results**2
    return min(share * (1 - share) / variance, results) if variance > 0 else results


def judge(escalation: Escalation, first: ScoredRows, then: ScoredRows, factor: float = 1.0) -> Escalation:
    """Replace the figures of an escalation by those on these rows; a factor turns shares into accuracies."""
    after = first.escalated(then, escalation.confidence_below)
    effective = effective_samples(after.correct, after.total)
    low, _ = wilson_interval(after.accuracy * effective, effective)
    figures = {
        "share": round(float((first.confidence < escalation.confidence_below).mean()), 4),
        "accuracy": round(min(1.0, factor * after.accuracy), 4),
        "accuracy_low": round(max(min(1.0, factor * low) - 5e-5, 0.0), 4),
        "samples": first.confidence.size,
    }
    return escalation.replace(**figures)


def held_out_escalations(
    points: Mapping[Key, ScoredRows],
    chosen_on: NDArray[np.bool_],
    seconds: Mapping[Key, float],
    *,
    factor: float = 1.0,
    serves_beside: Callable[[str, str], bool] = lambda *_: True,
) -> dict[Key, tuple[Escalation, ...]]:
    """Undominated escalations of a stage, with thresholds chosen on some of the rows and figures of the others.

    `seconds` are those of a row at each point; empty if they are unknown. A factor turns shares of correct results into
    accuracies. `serves_beside`: whether rows of the first variant may run again at the second.
    """
    chosen = measure_stage_escalations({key: rows.subset(chosen_on).sample() for key, rows in points.items()})
    others = {key: rows.subset(~chosen_on) for key, rows in points.items()}
    judged = {
        first: [
            judge(again, others[first], others[again.target(first[0])], factor)
            for again in listed
            if serves_beside(first[0], again.target(first[0])[0])
        ]
        for first, listed in chosen.items()
    }
    return undominated_escalations(judged, {key: factor * rows.accuracy for key, rows in others.items()}, seconds)
