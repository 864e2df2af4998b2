"""Forms tried in this process: timed, and those that save time judged on a user's own samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimtab.tuning.candidate_model import CandidateModel
from trimtab.tuning.quality import QualityEvaluator
from trimtab.tuning.selection import Trial, slower
from trimtab.tuning.timing import Timer
from trimtab_pipelines.operating_point import Precision


@dataclass(frozen=True, slots=True)
class TrialResults:
    """What was measured.

    Attributes:
        trials: the forms that were timed and judged, the model as it is first.
        row_seconds: of a row in the largest batch, of all forms that were timed, by name.
        slow: why those that save no time were not judged, by name.
        unjudged: the names of those that nobody had time to judge.
        slow_precisions: how many times as long the model takes in a precision that saves no time; forms in it that
            merge tokens too were not timed.
    """

    trials: Sequence[Trial]
    row_seconds: Mapping[str, float]
    slow: Mapping[str, str]
    unjudged: Sequence[str]
    slow_precisions: Mapping[Precision, float] = field(default_factory=dict)


def run_trials(
    bench: CandidateModel, judge: QualityEvaluator, timer: Timer, batches: Sequence[int], share: float = 1.0
) -> TrialResults:
    """Time every point of a bench, and judge those that save time.

    The timer's budget ends it: what is judged by then counts. The model as it is, is timed and judged whatever that
    takes.

    Args:
        bench: with the points.
        judge: of their answers.
        timer: of their latencies.
        batches: that they are timed at.
        share: of the budget, what it may take.
    """
    slower_in = timer.slow_precisions()
    points = [point for point in bench.points if point.precision not in slower_in]
    seconds, largest = timer.by_batch(points, batches), max(batches)
    row_seconds = {name: taken[largest] / largest for name, taken in seconds.items()}
    full, *others = points
    slow = {point.name: why for point in others if (why := slower(row_seconds[point.name], row_seconds[full.name]))}
    found = []
    for point in (point for point in points if point.name not in slow):
        timer.show(f"accuracy of {point.name}")
        judgement = judge.evaluate(point, None if point is full else timer.budget, share)
        if judgement is not None:
            found.append(Trial(point, judgement.accuracy, seconds[point.name], judgement.by_task))
    judged = {trial.point.name for trial in found}
    unjudged = [name for name in row_seconds if name not in judged | slow.keys()]
    return TrialResults(found, row_seconds, slow, unjudged, slower_in)
