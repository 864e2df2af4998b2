"""Which of the forms that were tried are kept, and why each of the others is not. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.operating_point import OperatingPoint

LEAST_GAIN = 0.05
"""How much faster a point must be than the next more accurate one that is kept."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A form as it was measured.

    Attributes:
        point: the form.
        accuracy: on the user's samples; agreement with the model as it is where they have no right answers.
        seconds: by batch size, beside the model as it is in the same rounds.
        by_task: its accuracy on those of each task, where they tell theirs.
    """

    point: OperatingPoint
    accuracy: Accuracy
    seconds: Mapping[int, float]
    by_task: Mapping[str, Accuracy] = field(default_factory=dict)

    @property
    def row_seconds(self) -> float:
        """Of one row in the largest batch, which is what a busy stage runs."""
        batch = max(self.seconds)
        return self.seconds[batch] / batch


@dataclass(frozen=True, slots=True)
class Selection:
    """The forms kept, the most accurate first, and the reason why each other one is not, by its name."""

    kept: Sequence[Trial]
    refused: Mapping[str, str] = field(default_factory=dict)


def choose(trials: Sequence[Trial], floor: float) -> Selection:
    """Keep what nothing else beats, with steps in between that are worth a change.

    Args:
        trials: the model as it is first; it is always kept.
        floor: share of its accuracy that every point must keep, 0…1.
    """
    full, *others = trials
    least = floor * full.accuracy.value
    kept, refused = [full], {}
    for trial in sorted(others, key=lambda one: (-one.accuracy.value, one.row_seconds)):
        reason = _too_little(trial, full, least) or _beaten(trial, kept[-1])
        if reason is None:
            kept.append(trial)
        else:
            refused[trial.point.name] = reason
    return Selection(kept, refused)


def slower(row_seconds: float, full_row_seconds: float) -> str | None:
    """Why a form that saves no time is not kept, however accurate it is."""
    if row_seconds < full_row_seconds:
        return None
    return f"{row_seconds / full_row_seconds:.2f} × as long as the model as it is, on this machine"


def metric_name(accuracy: Accuracy) -> str:
    """What a figure is called: accuracy, or agreement where nobody knows the right answers."""
    return "agreement" if accuracy.source == "Agreement" else "accuracy"


def _too_little(trial: Trial, full: Trial, least: float) -> str | None:
    if trial.accuracy.value < least:
        return f"{metric_name(trial.accuracy)} {trial.accuracy.value:.4f} is below the floor {least:.4f}"
    return slower(trial.row_seconds, full.row_seconds)


def _beaten(trial: Trial, last: Trial) -> str | None:
    """Why a form is not worth keeping beside the last one kept, which is at least as accurate."""
    ratio = trial.row_seconds / last.row_seconds
    if ratio >= 1:
        return f"{last.point.name} is as accurate and takes {1 / ratio:.2f} × its time"
    if ratio > 1 - LEAST_GAIN:
        return f"less than {LEAST_GAIN:.0%} faster than {last.point.name}, which is as accurate"
    return None
