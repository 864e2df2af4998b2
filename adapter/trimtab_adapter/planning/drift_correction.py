"""Drift correction: replaces profiled accuracies by observed ones if they differ."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from trimtab_pipelines.accuracy_evidence import Accuracy, AccuracyEvidence
from trimtab_pipelines.escalation import Escalation, TaskEscalation
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.variants import Variant

AccuracyKey = tuple[str, str, str, str]
"""Stage, variant, operating point and task; an empty task stands for all rows."""
RegisteredAccuracies = Mapping[tuple[str, str, str], Mapping[str, Accuracy]]
"""By stage, variant and operating point: the accuracy on each task registered at run time."""
ROUNDING = 0.005 + 1e-9
"""Rounding of observed accuracies, which are reported in hundredths."""
_EscalationType = TypeVar("_EscalationType", Escalation, TaskEscalation)
_Evidence = TypeVar("_Evidence", bound=AccuracyEvidence)


def apply_observed_accuracy(
    spec: InferencePipelineSpec, accuracies: Mapping[AccuracyKey, float]
) -> InferencePipelineSpec:
    """Replace profiled accuracies by observed ones.

    A task without an observation changes with its operating point; an interval moves with its value. An escalation
    changes with its two points, each by its share of rows, and is removed if its target is no longer more accurate.
    """
    if not accuracies:
        return spec

    def corrected(stage: Stage, variant: Variant) -> Variant:
        own = {(p, task): now for (s, v, p, task), now in accuracies.items() if (s, v) == (stage.name, variant.name)}
        changes = _Changes.of(variant, own)
        return _with_points(variant, lambda point: _point(variant, point, changes)) if own else variant

    return _with_variants(spec, corrected)


@dataclass(frozen=True, slots=True)
class _Changes:
    """Accuracy changes of a variant's operating points, overall and by task."""

    overall: Mapping[str, float]
    on_tasks: Mapping[tuple[str, str], float]

    @classmethod
    def of(cls, variant: Variant, accuracies: Mapping[tuple[str, str], float]) -> "_Changes":
        """From accuracies by operating point and task; unknown points and tasks are ignored."""
        overall, on_tasks = dict.fromkeys((point.name for point in variant.points), 0.0), {}
        for point in variant.points:
            if (point.name, "") in accuracies:
                overall[point.name] = _change(accuracies[point.name, ""], point.accuracy)
            for task, before in point.accuracy_by_task.items():
                if (point.name, task) in accuracies:
                    on_tasks[point.name, task] = _change(accuracies[point.name, task], before.value)
        return cls(overall, on_tasks)

    def on(self, point: str, task: str) -> float:
        """The change of a point on a task; the point's own change if the task was not observed."""
        return self.on_tasks.get((point, task), self.overall[point])


def with_registered_tasks(
    spec: InferencePipelineSpec, registered_accuracies: RegisteredAccuracies
) -> InferencePipelineSpec:
    """Add tasks registered at run time, so that a point that is the best for one of them is not excluded."""
    if not registered_accuracies:
        return spec

    def extended(stage: Stage, variant: Variant) -> Variant:
        def with_tasks(point: OperatingPoint) -> OperatingPoint:
            registered = dict(registered_accuracies.get((stage.name, variant.name, point.name), {}))
            return point.model_copy(update={"accuracy_by_task": registered | point.accuracy_by_task})

        return _with_points(variant, with_tasks)

    return _with_variants(spec, extended)


def _with_variants(spec: InferencePipelineSpec, change: Callable[[Stage, Variant], Variant]) -> InferencePipelineSpec:
    """A spec with changed variants, validated anew because copies keep cached properties."""
    stages = tuple(
        stage.model_copy(update={"variants": tuple(change(stage, variant) for variant in stage.variants)})
        for stage in spec.stages
    )
    return InferencePipelineSpec.model_validate(spec.model_copy(update={"stages": stages}).model_dump(by_alias=True))


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
        return variant.model_copy(update={"operating_points": changed})
    update = {name: getattr(changed[0], name) for name in ("accuracy", "accuracy_by_task", "accuracy_evidence")}
    return variant.model_copy(update={name: value for name, value in update.items() if value is not None})


def _point(variant: Variant, point: OperatingPoint, changes: _Changes) -> OperatingPoint:
    own = changes.overall
    evidence = None if point.accuracy_evidence is None else _shift_interval(point.accuracy_evidence, own[point.name])
    now = {other.name: other.accuracy + own[other.name] for other in variant.points}
    escalations = [escalation for escalation in point.escalations if now[escalation.to] > now[point.name]]
    tasks = {}
    for task, before in point.accuracy_by_task.items():
        by = changes.on(point.name, task)
        tasks[task] = _shift_interval(before, by).model_copy(update={"value": _shift(before.value, by)})
    return point.model_copy(
        update={
            "accuracy": _shift(point.accuracy, own[point.name]),
            "accuracy_evidence": evidence,
            "accuracy_by_task": tasks,
            "escalations": tuple(_escalation(escalation, point.name, changes) for escalation in escalations),
        }
    )


def _escalation(escalation: Escalation, first: str, changes: _Changes) -> Escalation:
    """An escalation after the accuracies of its two points changed, overall and by task."""
    by_task = {
        task: _shifted(own, changes.on(first, task), changes.on(escalation.to, task))
        for task, own in escalation.by_task.items()
    }
    moved = _shifted(escalation, changes.overall[first], changes.overall[escalation.to])
    return moved.model_copy(update={"by_task": by_task})


def _shifted(escalation: _EscalationType, first: float, then: float) -> _EscalationType:
    by = (1 - escalation.share) * first + escalation.share * then
    low = None if escalation.accuracy_low is None else _shift(escalation.accuracy_low, by)
    return escalation.model_copy(update={"accuracy": _shift(escalation.accuracy, by), "accuracy_low": low})


def _shift_interval(evidence: _Evidence, by: float) -> _Evidence:
    ends = {"low": evidence.low, "high": evidence.high}
    return evidence.model_copy(update={end: _shift(value, by) for end, value in ends.items() if value is not None})


def _change(observed: float, measured: float) -> float:
    """The change of an accuracy; 0 if it is within rounding."""
    return 0.0 if abs(observed - measured) <= ROUNDING else observed - measured


def _shift(value: float, by: float) -> float:
    return min(max(value + by, 0.0), 1.0)
