"""Escalation thresholds by task.

A single threshold for several tasks would escalate the rows of a task that the first point is bad at, even if the
second point is as bad at it. So each task has its own threshold, and an escalation has a price: the correct responses
it must gain on average. At each price, each task uses the threshold with the largest gain beyond it. A task that gains
nothing has threshold 0.

The results of chosen thresholds are cross-fitted: each half of a task's rows is evaluated with thresholds chosen on the
other half.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PRICES = (0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3)
"""Correct responses that an escalation must gain on average."""
STEPS = 100
"""Number of thresholds that are tried: 0.01, 0.02, … of confidence."""
_HALVES_SEED = 23


class PairedAnswers(NamedTuple):
    """Held-out rows of one task at two points: confidence of the first, and correctness of both.

    All of shape (rows,); confidence 0…1.
    """

    confidence: NDArray[np.floating]
    right: NDArray[np.bool_]
    right_escalated: NDArray[np.bool_]

    def subset(self, rows: NDArray[np.bool_]) -> "PairedAnswers":
        """Some of the rows."""
        return PairedAnswers(self.confidence[rows], self.right[rows], self.right_escalated[rows])

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


def task_thresholds(by_task: Mapping[str, PairedAnswers]) -> list[ThresholdByTask]:
    """Thresholds at each price, ascending; prices that change no threshold are left out."""
    distinct: list[ThresholdByTask] = []
    for price in PRICES:
        priced = {task: _threshold_at(answers, price) for task, answers in by_task.items()}
        if not distinct or any(distinct[-1][task].below != threshold.below for task, threshold in priced.items()):
            distinct.append(priced)
    return distinct


def _threshold_at(answers: PairedAnswers, price: float) -> TaskThreshold:
    below, rows = best_threshold(answers, price), answers.right.size
    half = np.random.default_rng(_HALVES_SEED).permutation(rows) % 2 == 0
    hits = sum(answers.subset(~fold).hits(best_threshold(answers.subset(fold), price)) for fold in (half, ~half))
    return TaskThreshold(below, float((answers.confidence < below).mean()), hits, rows)


def best_threshold(answers: PairedAnswers, price: float) -> float:
    """Lowest threshold with the largest gain beyond the price of its escalations; 0 if none gains anything.

    Args:
        answers: of one task; may be empty.
        price: correct responses per escalation, 0 or more.
    """
    order = np.argsort(answers.confidence, kind="stable")
    gained = answers.right_escalated[order].astype(np.int64) - answers.right[order]
    belows = np.arange(STEPS + 2) / STEPS  # above 1: all rows are escalated
    counts = np.searchsorted(answers.confidence[order], belows, side="left")
    gains = np.concatenate(([0], np.cumsum(gained)))[counts] - price * counts
    return float(belows[int(gains.argmax())])
