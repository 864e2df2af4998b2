"""Trials of candidate points in this process: each is timed and, if it is faster than the full model, evaluated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimtab.tuning.candidate_model import CandidateModel
from trimtab.tuning.quality import QualityEvaluator
from trimtab.tuning.selection import Trial, why_slower
from trimtab.tuning.timing import Timer
from trimtab_pipelines.operating_point import Precision


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
