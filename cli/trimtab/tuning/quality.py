"""Quality of operating points on samples: accuracy or, without labels, agreement with the full model.

Agreement is not an accuracy: points may agree with wrong answers of the model.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from trimtab.tuning.candidate_model import CandidateModel
from trimtab.tuning.timing import TimeBudget
from trimtab_loadtester.payloads.interface import Score
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_pipelines.accuracy_evidence import Accuracy, AccuracySource, mean_confidence, measured_accuracy
from trimtab_pipelines.operating_point import OperatingPoint


class Quality(NamedTuple):
    """Quality of a point: on all samples, and by task if they name their tasks."""

    accuracy: Accuracy
    by_task: Mapping[str, Accuracy]


class _SampleResult(NamedTuple):
    score: Score
    task: str = ""
    confidence: float = math.nan


class QualityEvaluator:
    """Evaluates points on the first samples of a set."""

    def __init__(self, model: CandidateModel, samples: LabelledPayloads, count: int, batch: int) -> None:
        """Create an evaluator.

        Args:
            model: its first point is the full model.
            samples: with or without labels.
            count: number of samples to use.
            batch: rows per batch.
        """
        self._model, self._samples, self._count, self._batch = model, samples, count, batch
        self._digest, self._tasks = samples.digest(), samples.tasks(count)
        self._full_labels: dict[int, torch.Tensor] = {}
        """Answers of the full model by the first index of their batch, for samples without labels."""

    def evaluate(self, point: OperatingPoint, budget: TimeBudget | None = None, share: float = 1.0) -> Quality | None:
        """Evaluate a point; None if the share of the budget is spent before the end."""
        results: list[_SampleResult] = []
        for low in range(0, self._count, self._batch):
            if budget is not None and budget.over(share):
                return None
            numbers = range(low, min(self._count, low + self._batch))
            results += (self._score if self._samples.labelled else self._compare)(numbers, point)
        exact = not self._samples.labelled and point is self._model.points[0]  # the full model agrees with itself
        by_task = {
            task: self._accuracy([result for result in results if result.task == task], exact=exact)
            for task in self._tasks
        }
        return Quality(self._accuracy(results, self._tasks, exact=exact), by_task)

    def _compare(self, numbers: range, point: OperatingPoint) -> Iterator[_SampleResult]:
        """Compare the answers to some samples with those of the full model."""
        rows = self._model.rows([self._samples.payload(number) for number in numbers])
        if numbers.start not in self._full_labels:
            self._full_labels[numbers.start] = self._model.labels(rows, self._model.points[0])
        agreement = self._model.labels(rows, point) == self._full_labels[numbers.start]
        for number, agrees in zip(numbers, agreement.tolist(), strict=True):
            yield _SampleResult(Score(int(agrees), 1), self._samples.task(number))

    def _score(self, numbers: range, point: OperatingPoint) -> Iterator[_SampleResult]:
        """Score the answers to some samples."""
        payloads = [self._samples.payload(number) for number in numbers]
        outputs, confidences = self._model.run(self._model.rows(payloads), point)
        for row, (number, payload) in enumerate(zip(numbers, payloads, strict=True)):
            row_outputs = {name: rows[row : row + 1].numpy() for name, rows in outputs.items()}
            confidence = math.nan if confidences is None else float(confidences[row])
            score = self._samples.score(payload.truth, row_outputs)
            yield _SampleResult(score, self._samples.task(number), confidence)

    def _accuracy(self, results: Sequence[_SampleResult], tasks: Sequence[str] = (), *, exact: bool) -> Accuracy:
        """Combine the results of samples; `tasks` are those with accuracies of their own."""
        correct, total = sum(result.score.correct for result in results), sum(result.score.total for result in results)
        source: AccuracySource = "Measured" if self._samples.labelled else "Agreement"
        accuracy = measured_accuracy(correct, total, samples_digest=self._digest, source=source)
        confidence = mean_confidence([result.confidence for result in results], tasks)
        interval = {"low": 1.0, "high": 1.0} if exact else {}
        return accuracy.model_copy(update={"samples": len(results), "mean_confidence": confidence, **interval})
