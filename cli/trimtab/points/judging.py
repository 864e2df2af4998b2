"""How good forms are on a user's samples: how often they are right or, without right answers, answer as the model does.

The latter is called agreement, and is no accuracy: a model that is wrong is agreed with all the same.
"""

import math

import torch

from trimtab.points.bench import Bench
from trimtab.points.budget import Budget
from trimtab_loadtester.labelled import LabelledPayloads
from trimtab_pipelines.evidence import Accuracy, wilson_interval
from trimtab_pipelines.operating_point import OperatingPoint


class Judge:
    """Judges points on the first so many samples."""

    def __init__(self, bench: Bench, samples: LabelledPayloads, count: int, batch: int) -> None:
        """Take samples.

        Args:
            bench: what computes; its first point is the model as it is.
            samples: with right answers or without.
            count: how many of them.
            batch: rows computed at a time.
        """
        self._bench, self._samples, self._count, self._batch = bench, samples, count, batch
        self._digest = samples.digest()
        self._as_it_is: dict[int, torch.Tensor] = {}
        """The model's own answers, by where their batch begins; only where nobody knows the right ones."""

    def accuracy(self, point: OperatingPoint, budget: Budget | None = None, share: float = 1.0) -> Accuracy | None:
        """How often a point is right, or agrees; None where such a share of the budget is spent before."""
        good = total = 0
        for low in range(0, self._count, self._batch):
            if budget is not None and budget.over(share):
                return None
            right, judged = self._judged(low, point)
            good, total = good + right, total + judged
        exact = not self._samples.labelled and point is self._bench.points[0]  # it is itself, and not by chance
        low_end, high_end = (1.0, 1.0) if exact else wilson_interval(good, total)
        return Accuracy(
            value=round(good / total, 4),
            source="Measured" if self._samples.labelled else "Agreement",
            samples=self._count,
            low=math.floor(1e4 * low_end) / 1e4,
            high=min(1.0, math.ceil(1e4 * high_end) / 1e4),
            samples_digest=self._digest,
        )

    def _judged(self, low: int, point: OperatingPoint) -> tuple[int, int]:
        """Of one batch, how many answers are good, and how many there are."""
        payloads = [self._samples.payload(at) for at in range(low, min(self._count, low + self._batch))]
        rows = self._bench.rows(payloads)
        if not self._samples.labelled:
            if low not in self._as_it_is:
                self._as_it_is[low] = self._bench.labels(rows, self._bench.points[0])
            return int((self._bench.labels(rows, point) == self._as_it_is[low]).sum()), len(payloads)
        outputs = self._bench.run(rows, point)
        right = total = 0
        for row, payload in enumerate(payloads):
            named = {name: rows[row : row + 1].numpy() for name, rows in outputs.items()}
            score = self._samples.score(payload.truth, named)
            right, total = right + score.correct, total + score.total
        return right, total
