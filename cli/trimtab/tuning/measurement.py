"""Measurement of candidate points in this process: latencies, qualities, and the trials that combine them.

Latencies are measured in interleaved rounds, so that other load affects all points equally. Quality is the accuracy on
samples or, without labels, the agreement with the full model; points may agree with wrong answers of the model.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from trimtab.tuning.candidate_model import CandidateModel, Inputs
from trimtab.tuning.selection import Trial, why_slower
from trimtab_loadtester.payloads.interface import Payload, Score
from trimtab_loadtester.payloads.labelled import LabelledPayloads
from trimtab_pipelines.accuracy_evidence import Accuracy, AccuracySource, mean_confidence, measured_accuracy
from trimtab_pipelines.operating_point import OperatingPoint, Precision

OnProgress = Callable[[str], None]
"""Called with a description of each step."""
ROUNDS = 5
PROBE_ROUNDS = 3
TIMING_SHARE = 0.4
"""Share of the time budget after which timing skips rounds and smaller batch sizes."""
PROBE_SHARE = 0.1
"""Share of the time budget after which probing precisions skips all rounds but the first."""


class TimeBudget:
    """Time limit of a search, which starts now."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self.clock, self._start = seconds, clock, clock()

    def over(self, share: float = 1.0) -> bool:
        return self.left(share) <= 0

    def left(self, share: float = 1.0) -> float:
        """Seconds until this share of the budget is spent; negative afterwards."""
        return share * self.seconds - (self.clock() - self._start)


@dataclass(frozen=True, slots=True)
class Timer:
    """Measures latencies of operating points."""

    model: CandidateModel
    payloads: Sequence[Payload]
    """Rows of the largest batch."""
    on_progress: OnProgress
    budget: TimeBudget
    """The largest batch gets one round at least, whatever is left."""

    def by_batch(
        self, points: Sequence[OperatingPoint], batches: Sequence[int], share: float = TIMING_SHARE
    ) -> dict[str, dict[int, float]]:
        """Median seconds by point and batch size, the largest first; smaller ones while the budget's share lasts."""
        seconds: dict[str, dict[int, float]] = {point.name: {} for point in points}
        for batch in sorted(batches, reverse=True):
            if batch < max(batches) and self.budget.over(share):
                break
            inputs = self.model.rows(self.payloads[:batch])
            for name, rounds in self._rounds(points, inputs, ROUNDS, share, f"latency at batch {batch}").items():
                seconds[name][batch] = statistics.median(rounds)
        return seconds

    def slow_precisions(self) -> Mapping[Precision, float]:
        """Precisions in which the full model is not faster, with their time relative to its own precision.

        The minimum of a few rounds is compared, which other load affects least.
        """
        full, *others = self.model.points
        probes: dict[Precision, OperatingPoint] = {}
        for point in others:
            if point.precision and point.merging is None:
                probes.setdefault(point.precision, point)
        if not probes:
            return {}
        inputs = self.model.rows(self.payloads)
        rounds = self._rounds([full, *probes.values()], inputs, PROBE_ROUNDS, PROBE_SHARE, "precisions")
        fastest = {name: min(seconds) for name, seconds in rounds.items()}
        ratios = {precision: fastest[point.name] / fastest[full.name] for precision, point in probes.items()}
        return {precision: ratio for precision, ratio in ratios.items() if ratio >= 1}

    def _rounds(
        self, points: Sequence[OperatingPoint], inputs: Inputs, rounds: int, share: float, description: str
    ) -> dict[str, list[float]]:
        """Run one batch at all points in turn, round after round; return the seconds of each round by point."""
        seconds: dict[str, list[float]] = {point.name: [] for point in points}
        for number in range(rounds + 1):
            for point in points:
                start = self.budget.clock()
                self.model.run(inputs, point)
                if number:  # round 0 is the warm-up
                    seconds[point.name].append(self.budget.clock() - start)
            self.on_progress(description)
            if number and self.budget.over(share):
                break
        return seconds


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
        """Evaluate on `count` samples, in batches of `batch` rows; the model's first point is the full model."""
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
        rows = self._model.rows([self._samples.payload(number) for number in numbers])
        if numbers.start not in self._full_labels:
            self._full_labels[numbers.start] = self._model.labels(rows, self._model.points[0])
        agreement = self._model.labels(rows, point) == self._full_labels[numbers.start]
        for number, agrees in zip(numbers, agreement.tolist(), strict=True):
            yield _SampleResult(Score(int(agrees), 1), self._samples.task(number))

    def _score(self, numbers: range, point: OperatingPoint) -> Iterator[_SampleResult]:
        payloads = [self._samples.payload(number) for number in numbers]
        outputs, confidences = self._model.run(self._model.rows(payloads), point)
        for row, (number, payload) in enumerate(zip(numbers, payloads, strict=True)):
            row_outputs = {name: rows[row : row + 1].numpy() for name, rows in outputs.items()}
            confidence = math.nan if confidences is None else float(confidences[row])
            score = self._samples.score(payload.truth, row_outputs)
            yield _SampleResult(score, self._samples.task(number), confidence)

    def _accuracy(self, results: Sequence[_SampleResult], tasks: Sequence[str] = (), *, exact: bool) -> Accuracy:
        """Combine results; `tasks` are those with accuracies of their own."""
        correct, total = sum(result.score.correct for result in results), sum(result.score.total for result in results)
        source: AccuracySource = "Measured" if self._samples.labelled else "Agreement"
        accuracy = measured_accuracy(correct, total, samples_digest=self._digest, source=source)
        confidence = mean_confidence([result.confidence for result in results], tasks)
        interval = {"low": 1.0, "high": 1.0} if exact else {}
        return accuracy.replace(samples=len(results), mean_confidence=confidence, **interval)


@dataclass(frozen=True, slots=True)
class TrialResults:
    """Results of the trials; mappings are by point name."""

    trials: Sequence[Trial]
    """Timed and evaluated points, the full model first."""
    row_seconds: Mapping[str, float]
    """Seconds of a row in the largest batch, of all timed points."""
    slow: Mapping[str, str]
    """Reasons why slow points were not evaluated."""
    unevaluated: Sequence[str]
    """Points for which no time was left."""
    slow_precisions: Mapping[Precision, float] = field(default_factory=dict)
    """Relative times of precisions that are not faster; merging points in these were not timed."""


def run_trials(
    model: CandidateModel, evaluator: QualityEvaluator, timer: Timer, batches: Sequence[int], share: float = 1.0
) -> TrialResults:
    """Time every point of a model, and evaluate the faster ones until a share of the timer's budget is spent.

    The full model is always timed and evaluated.
    """
    slow_precisions = timer.slow_precisions()
    points = [point for point in model.points if point.precision not in slow_precisions]
    seconds, largest = timer.by_batch(points, batches), max(batches)
    row_seconds = {name: by_batch[largest] / largest for name, by_batch in seconds.items()}
    full, *others = points
    slow = {
        point.name: reason
        for point in others
        if (reason := why_slower(row_seconds[point.name], row_seconds[full.name]))
    }
    trials = []
    for point in (point for point in points if point.name not in slow):
        timer.on_progress(f"accuracy of {point.name}")
        quality = evaluator.evaluate(point, None if point is full else timer.budget, share)
        if quality is not None:
            trials.append(Trial(point, quality.accuracy, seconds[point.name], quality.by_task))
    evaluated = {trial.point.name for trial in trials}
    unevaluated = [name for name in row_seconds if name not in evaluated | slow.keys()]
    return TrialResults(trials, row_seconds, slow, unevaluated, slow_precisions)
