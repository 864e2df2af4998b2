"""Drift correction: replaces profiled accuracies by observed ones if they differ."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from trimtab_pipelines.accuracy_evidence import Accuracy, AccuracyEvidence
from trimtab_pipelines.escalation import Escalation, Key, TaskEscalation
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.variants import Variant

AccuracyKey = tuple[str, str, str, str]
"""Stage, variant, operating point and task; an empty task stands for all rows."""
RegisteredAccuracies = Mapping[tuple[str, str, str], Mapping[str, Accuracy]]
"""By stage, variant and operating point: the accuracy on each task registered at run time."""
ThresholdKey = tuple[str, str, str, float]
"""Stage, variant, operating point, and the confidence below which rows are escalated."""
MIN_SHARE_DRIFT = 0.03
"""Smallest change of an escalated share that is planned with."""
ROUNDING = 0.005 + 1e-9
"""Rounding of observed accuracies, which are reported in hundredths."""
_EscalationType = TypeVar("_EscalationType", Escalation, TaskEscalation)
_Evidence = TypeVar("_Evidence", bound=AccuracyEvidence)


def apply_observed_accuracy(
    spec: InferencePipelineSpec, accuracies: Mapping[AccuracyKey, float]
) -> InferencePipelineSpec:
    """Replace profiled accuracies by observed ones.

    A task without an observation changes with its operating point; an interval moves with its value. An escalation
    changes with its two points, each by its share of rows, and is removed if its target is then not more accurate.
    """
    if not accuracies:
        return spec

    def corrected(stage: Stage, variant: Variant) -> Variant:
        own = {(name, point, task): now for (s, name, point, task), now in accuracies.items() if s == stage.name}
        changes = _Changes.of(stage, own)
        return _with_points(variant, lambda point: _point(variant.name, point, changes)) if own else variant

    return _with_variants(spec, corrected)


def apply_observed_shares(
    spec: InferencePipelineSpec, shares: Mapping[ThresholdKey, float]
) -> tuple[InferencePipelineSpec, tuple[str, ...]]:
    """Replace the profiled shares of escalations by observed ones; return also what changed.

    At a threshold without observation, the odds of a share change as at the nearest threshold of the same point.
    """
    changes = dict(_share_changes(spec, shares))
    if not changes:
        return spec, ()

    def corrected(stage: Stage, variant: Variant) -> Variant:
        return _with_points(variant, lambda point: _with_shares(point, (stage.name, variant.name, point.name), changes))

    phrases = (
        f"{stage}: {now:.0%} of the rows of {variant}/{point} have a confidence below {below:g}, {before:.0%} in its "
        "evidence"
        for (stage, variant, point, below), (before, now) in changes.items()
    )
    return _with_variants(spec, corrected), tuple(phrases)


def _share_changes(
    spec: InferencePipelineSpec, shares: Mapping[ThresholdKey, float]
) -> Iterator[tuple[ThresholdKey, tuple[float, float]]]:
    """Yield the thresholds whose share changed, with the profiled and the observed share."""
    for stage in spec.stages:
        for variant in stage.variants:
            for point in variant.points:
                for escalation in point.escalations:
                    threshold = (stage.name, variant.name, point.name, escalation.confidence_below)
                    share = shares.get(threshold, escalation.share)
                    if abs(share - escalation.share) > MIN_SHARE_DRIFT:
                        yield threshold, (escalation.share, share)


def _with_shares(
    point: OperatingPoint, key: tuple[str, str, str], changes: Mapping[ThresholdKey, tuple[float, float]]
) -> OperatingPoint:
    own = {threshold[3]: change for threshold, change in changes.items() if threshold[:3] == key}
    if not own:
        return point
    return point.replace(escalations=tuple(_with_share(each, own) for each in point.escalations))


def _with_share(escalation: Escalation, changes: Mapping[float, tuple[float, float]]) -> Escalation:
    before, now = changes[min(changes, key=lambda below: abs(below - escalation.confidence_below))]
    odds = _odds(now) / _odds(before) * _odds(escalation.share)
    return escalation.replace(share=round(odds / (1.0 + odds), 4))


def _odds(share: float) -> float:
    bounded = min(max(share, 1e-4), 1.0 - 1e-4)
    return bounded / (1.0 - bounded)


@dataclass(frozen=True, slots=True)
class _Changes:
    """Accuracy changes of a stage's operating points, by variant and point, overall and by task."""

    accuracies: Mapping[Key, float]
    """Those that were profiled."""
    overall: Mapping[Key, float]
    on_tasks: Mapping[tuple[str, str, str], float]

    @classmethod
    def of(cls, stage: Stage, observed: Mapping[tuple[str, str, str], float]) -> "_Changes":
        """From accuracies by variant, operating point and task; unknown points and tasks are ignored."""
        accuracies, overall, on_tasks = {}, {}, {}
        for variant in stage.variants:
            for point in variant.points:
                key = variant.name, point.name
                accuracies[key] = point.accuracy
                overall[key] = _change(observed.get((*key, ""), point.accuracy), point.accuracy)
                for task, before in point.accuracy_by_task.items():
                    if (*key, task) in observed:
                        on_tasks[*key, task] = _change(observed[*key, task], before.value)
        return cls(accuracies, overall, on_tasks)

    def on(self, point: Key, task: str) -> float:
        """The change of a point on a task; the point's own change if the task was not observed."""
        return self.on_tasks.get((*point, task), self.overall[point])

    def keeps(self, first: Key, target: Key) -> bool:
        """Whether the target of an escalation is still more accurate than the first point."""
        now = {key: self.accuracies[key] + self.overall[key] for key in (first, target)}
        return now[target] > now[first] or not (self.overall[first] or self.overall[target])


def with_registered_tasks(
    spec: InferencePipelineSpec, registered_accuracies: RegisteredAccuracies
) -> InferencePipelineSpec:
    """Add tasks registered at run time, so that a point that is the best for one of them is not excluded."""
    if not registered_accuracies:
        return spec

    def extended(stage: Stage, variant: Variant) -> Variant:
        def with_tasks(point: OperatingPoint) -> OperatingPoint:
            registered = dict(registered_accuracies.get((stage.name, variant.name, point.name), {}))
            return point.replace(accuracy_by_task=registered | point.accuracy_by_task)

        return _with_points(variant, with_tasks)

    return _with_variants(spec, extended)


def _with_variants(spec: InferencePipelineSpec, change: Callable[[Stage, Variant], Variant]) -> InferencePipelineSpec:
    stages = tuple(
        stage.replace(variants=tuple(change(stage, variant) for variant in stage.variants)) for stage in spec.stages
    )
    return spec.replace(stages=stages)


def drifted_points(requested: InferencePipelineSpec, corrected: InferencePipelineSpec) -> tuple[str, ...]:
    """Describe the points whose accuracy was replaced, and the tasks that changed differently from their point."""
    return tuple(
        f"{stage.name}: {variant.name}/{point.name}{words}"
        for stage, other in zip(requested.stages, corrected.stages, strict=True)
        for variant, its in zip(stage.variants, other.variants, strict=True)
        for point, now in zip(variant.points, its.points, strict=True)
        for words in _drift_phrases(point, now)
    )


def _drift_phrases(point: OperatingPoint, now: OperatingPoint) -> Iterator[str]:
    overall = now.accuracy - point.accuracy
    if overall:
        yield f": {now.accuracy:.2f} instead of {point.accuracy:.2f}"
    for task, before in point.accuracy_by_task.items():
        own = now.accuracy_by_task[task].value
        if own not in (before.value, _shift(before.value, overall)):
            yield f" on {task}: {own:.2f} instead of {before.value:.2f}"


def _with_points(variant: Variant, change: Callable[[OperatingPoint], OperatingPoint]) -> Variant:
    """The variant with changed operating points; without any its own accuracies are those of the only point."""
    changed = tuple(map(change, variant.points))
    if variant.operating_points:
        return variant.replace(operating_points=changed)
    fields = ("accuracy", "accuracy_by_task", "accuracy_evidence", "escalations")
    update = {name: getattr(changed[0], name) for name in fields}
    return variant.replace(**{name: value for name, value in update.items() if value is not None})


def _point(variant: str, point: OperatingPoint, changes: _Changes) -> OperatingPoint:
    key = variant, point.name
    own = changes.overall[key]
    evidence = None if point.accuracy_evidence is None else _shift_interval(point.accuracy_evidence, own)
    kept = [escalation for escalation in point.escalations if changes.keeps(key, escalation.target(variant))]
    tasks = {}
    for task, before in point.accuracy_by_task.items():
        by = changes.on(key, task)
        tasks[task] = _shift_interval(before, by).replace(value=_shift(before.value, by))
    return point.replace(
        accuracy=_shift(point.accuracy, own),
        accuracy_evidence=evidence,
        accuracy_by_task=tasks,
        escalations=tuple(_escalation(escalation, key, changes) for escalation in kept),
    )


def _escalation(escalation: Escalation, first: Key, changes: _Changes) -> Escalation:
    """An escalation after the accuracies of its two points changed, overall and by task."""
    target = escalation.target(first[0])
    by_task = {
        task: _shifted(own, changes.on(first, task), changes.on(target, task))
        for task, own in escalation.by_task.items()
    }
    moved = _shifted(escalation, changes.overall[first], changes.overall[target])
    return moved.replace(by_task=by_task)


def _shifted(escalation: _EscalationType, first: float, then: float) -> _EscalationType:
    by = (1 - escalation.share) * first + escalation.share * then
    low = None if escalation.accuracy_low is None else _shift(escalation.accuracy_low, by)
    return escalation.replace(accuracy=_shift(escalation.accuracy, by), accuracy_low=low)


def _shift_interval(evidence: _Evidence, by: float) -> _Evidence:
    ends = {"low": evidence.low, "high": evidence.high}
    return evidence.replace(**{end: _shift(value, by) for end, value in ends.items() if value is not None})


def _change(observed: float, measured: float) -> float:
    """The change of an accuracy; 0 if it is within rounding."""
    return 0.0 if abs(observed - measured) <= ROUNDING else observed - measured


def _shift(value: float, by: float) -> float:
    return min(max(value + by, 0.0), 1.0)
