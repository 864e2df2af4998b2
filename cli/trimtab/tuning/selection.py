"""Selection of operating points: those on the Pareto frontier of accuracy and time, in worthwhile steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.operating_point import OperatingPoint

MIN_GAIN = 0.05
"""Minimum share by which a point must be faster than the next more accurate one."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A measured point."""

    point: OperatingPoint
    accuracy: Accuracy
    """On the samples; agreement with the full model if they have no labels."""
    seconds: Mapping[int, float]
    """By batch size."""
    by_task: Mapping[str, Accuracy] = field(default_factory=dict)
    """Accuracy by task, if the samples name their tasks."""

    @property
    def row_seconds(self) -> float:
        """Seconds of a row in the largest batch."""
        batch = max(self.seconds)
        return self.seconds[batch] / batch


@dataclass(frozen=True, slots=True)
class Selection:
    """Selected points, the most accurate first, and the reasons of the others by name."""

    selected: Sequence[Trial]
    rejected: Mapping[str, str] = field(default_factory=dict)


def choose(trials: Sequence[Trial], floor: float) -> Selection:
    """Select the points that no other dominates, with worthwhile steps between them.

    The first trial is the full model, which is always selected; the others must reach a share `floor` of its accuracy.
    """
    full, *others = trials
    min_accuracy = floor * full.accuracy.value
    selected, rejected = [full], {}
    for trial in sorted(others, key=lambda trial: (-trial.accuracy.value, trial.row_seconds)):
        reason = _why_unusable(trial, full, min_accuracy) or _why_dominated(trial, selected[-1])
        if reason is None:
            selected.append(trial)
        else:
            rejected[trial.point.name] = reason
    return Selection(selected, rejected)


def why_slower(row_seconds: float, full_row_seconds: float) -> str | None:
    """Return the reason to reject a point that is not faster than the full model, else None."""
    if row_seconds < full_row_seconds:
        return None
    return f"{row_seconds / full_row_seconds:.2f} × the time of the full model on this machine"


def metric_name(accuracy: Accuracy) -> str:
    """Return `agreement` for samples without labels, else `accuracy`."""
    return "agreement" if accuracy.source == "Agreement" else "accuracy"


def _why_unusable(trial: Trial, full: Trial, min_accuracy: float) -> str | None:
    if trial.accuracy.value < min_accuracy:
        return f"{metric_name(trial.accuracy)} {trial.accuracy.value:.4f} is below the floor {min_accuracy:.4f}"
    return why_slower(trial.row_seconds, full.row_seconds)


def _why_dominated(trial: Trial, previous: Trial) -> str | None:
    """Compare a point with the last selected one, which is at least as accurate."""
    ratio = trial.row_seconds / previous.row_seconds
    if ratio >= 1:
        return f"{previous.point.name} is as accurate and takes {1 / ratio:.2f} × its time"
    if ratio > 1 - MIN_GAIN:
        return f"less than {MIN_GAIN:.0%} faster than {previous.point.name}, which is as accurate"
    return None
