"""How good forms are on a user's samples: how often they are right or, without right answers, answer as the model does.

The latter is called agreement, and is no accuracy: a model that is wrong is agreed with all the same.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from trimtab.tuning.budget import TimeBudget
from trimtab.tuning.candidate_model import CandidateModel
from trimtab_loadtester.payloads.interface import Score
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_pipelines.accuracy_evidence import Accuracy, AccuracySource, mean_confidence, measured_accuracy
from trimtab_pipelines.operating_point import OperatingPoint


class Quality(NamedTuple):
    """How good a form is: on all samples, and on those of each task where they tell theirs."""

    accuracy: Accuracy
    by_task: Mapping[str, Accuracy]


class _Sample(NamedTuple):
    """What came of one sample."""

    score: Score
    task: str = ""
    confidence: float = math.nan


class QualityEvaluator:
    """Judges points on the first so many samples."""

    def __init__(self, bench: CandidateModel, samples: LabelledPayloads, count: int, batch: int) -> None:
        """Take samples.

        Args:
            bench: what computes; its first point is the model as it is.
            samples: with right answers or without.
            count: how many of them.
            batch: rows computed at a time.
        """
        self._bench, self._samples, self._count, self._batch = bench, samples, count, batch
        self._digest, self._tasks = samples.digest(), samples.tasks(count)
        self._as_it_is: dict[int, torch.Tensor] = {}
        """The model's own answers, by where their batch begins; only where nobody knows the right ones."""

    def evaluate(self, point: OperatingPoint, budget: TimeBudget | None = None, share: float = 1.0) -> Quality | None:
        """How often a point is right, or agrees; None where such a share of the budget is spent before."""
        seen: list[_Sample] = []
        for low in range(0, self._count, self._batch):
            if budget is not None and budget.over(share):
                return None
            numbers = range(low, min(self._count, low + self._batch))
            seen += (self._right if self._samples.labelled else self._alike)(numbers, point)
        exact = not self._samples.labelled and point is self._bench.points[0]  # it is itself, and not by chance
        by_task = {task: self._accuracy([one for one in seen if one.task == task], exact=exact) for task in self._tasks}
        return Quality(self._accuracy(seen, self._tasks, exact=exact), by_task)

    def _alike(self, numbers: range, point: OperatingPoint) -> Iterator[_Sample]:
        """Which of these samples are answered as the model as it is answers them."""
        rows = self._bench.rows([self._samples.payload(number) for number in numbers])
        if numbers.start not in self._as_it_is:
            self._as_it_is[numbers.start] = self._bench.labels(rows, self._bench.points[0])
        alike = self._bench.labels(rows, point) == self._as_it_is[numbers.start]
        for number, agrees in zip(numbers, alike.tolist(), strict=True):
            yield _Sample(Score(int(agrees), 1), self._samples.task(number))

    def _right(self, numbers: range, point: OperatingPoint) -> Iterator[_Sample]:
        """Which of these samples are answered rightly, and how certain the model is of them."""
        payloads = [self._samples.payload(number) for number in numbers]
        outputs, confidences = self._bench.run(self._bench.rows(payloads), point)
        for row, (number, payload) in enumerate(zip(numbers, payloads, strict=True)):
            named = {name: rows[row : row + 1].numpy() for name, rows in outputs.items()}
            confidence = math.nan if confidences is None else float(confidences[row])
            yield _Sample(self._samples.score(payload.truth, named), self._samples.task(number), confidence)

    def _accuracy(self, seen: Sequence[_Sample], tasks: Sequence[str] = (), *, exact: bool) -> Accuracy:
        """Of some samples; their tasks are those that are told apart."""
        good, total = sum(one.score.correct for one in seen), sum(one.score.total for one in seen)
        source: AccuracySource = "Measured" if self._samples.labelled else "Agreement"
        found = measured_accuracy(good, total, samples_digest=self._digest, source=source)
        confidence = mean_confidence([one.confidence for one in seen], tasks)
        ends = {"low": 1.0, "high": 1.0} if exact else {}
        return found.model_copy(update={"samples": len(seen), "mean_confidence": confidence, **ends})
