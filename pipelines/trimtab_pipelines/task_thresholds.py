"""How uncertain a row must be to be looked at again, task by task. Pure.

Where a model answers several tasks, one best_threshold for all of them picks the rows of the task that it is bad at, though
a better point may be as bad at it. So each task has its own, and a look has a price: the right answers that it must win
on average. At a price each task takes the best_threshold that wins most beyond it; at none, every look that may win anything
is taken. What a task never wins by a look has best_threshold 0.

Thresholds that were chosen by what they win look better on those rows than on others. So what is told of them is
cross-fitted: each half of a task's rows is judged by thresholds that were chosen on the other half.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PRICES = (0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.15, 0.2, 0.3)
"""Right answers a look: from those who look again at all that may gain to those who hardly look at anything."""
STEPS = 100
"""Thresholds that are tried: 0.01, 0.02, … of confidence."""
_HALVES_SEED = 23


class PairedAnswers(NamedTuple):
    """One task's held-out rows as two points answer them: confidence of the first, and whether each is right.

    All of shape (rows,); confidence 0…1.
    """

    confidence: NDArray[np.floating]
    right: NDArray[np.bool_]
    right_escalated: NDArray[np.bool_]

    def only(self, rows: NDArray[np.bool_]) -> "PairedAnswers":
        """Some of the rows."""
        return PairedAnswers(self.confidence[rows], self.right[rows], self.right_escalated[rows])

    def hits(self, below: float) -> int:
        """How many are right once those that are less certain are looked at again."""
        return int(np.where(self.confidence < below, self.right_escalated, self.right).sum())


@dataclass(frozen=True, slots=True)
class TaskThreshold:
    """One task at one price.

    Attributes:
        below: confidence that too little is; 0: never again.
        share: of its rows that are less certain.
        hits: right answers among its rows, cross-fitted.
        rows: how many these are.
    """

    below: float
    share: float
    hits: int
    rows: int


ThresholdByTask = Mapping[str, TaskThreshold]
"""Every task at one price."""


def task_thresholds(by_task: Mapping[str, PairedAnswers]) -> list[ThresholdByTask]:
    """What each price comes to, from none on; prices at which all tasks do as at the one before are left out."""
    found: list[ThresholdByTask] = []
    for price in PRICES:
        priced = {task: _threshold_at(answers, price) for task, answers in by_task.items()}
        if not found or any(found[-1][task].below != one.below for task, one in priced.items()):
            found.append(priced)
    return found


def _threshold_at(answers: PairedAnswers, price: float) -> TaskThreshold:
    below, rows = best_threshold(answers, price), answers.right.size
    half = np.random.default_rng(_HALVES_SEED).permutation(rows) % 2 == 0
    hits = sum(answers.only(~own).hits(best_threshold(answers.only(own), price)) for own in (half, ~half))
    return TaskThreshold(below, float((answers.confidence < below).mean()), hits, rows)


def best_threshold(answers: PairedAnswers, price: float) -> float:
    """The lowest best_threshold that wins most beyond the price of its looks; 0 where none wins anything.

    Args:
        answers: of one task; none are allowed.
        price: right answers a look, 0 or more.
    """
    order = np.argsort(answers.confidence, kind="stable")
    won = answers.right_escalated[order].astype(np.int64) - answers.right[order]
    belows = np.arange(STEPS + 2) / STEPS  # above 1: all rows go again
    counts = np.searchsorted(answers.confidence[order], belows, side="left")
    gains = np.concatenate(([0], np.cumsum(won)))[counts] - price * counts
    return float(belows[int(gains.argmax())])
