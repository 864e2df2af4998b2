"""A pipeline with the accuracies that are observed, where they are not what was measured before. Pure."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from trimtab_pipelines.evidence import Accuracy, AccuracyEvidence
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.second_look import SecondLook, TaskLook
from trimtab_pipelines.spec import InferencePipelineSpec
from trimtab_pipelines.stages import Stage
from trimtab_pipelines.variants import Variant

_Looked = TypeVar("_Looked", SecondLook, TaskLook)


def corrected(spec: InferencePipelineSpec, accuracies: Mapping[tuple[str, str, str], float]) -> InferencePipelineSpec:
    """Put observed accuracies in the place of measured ones.

    An interval moves along with its value. A second look changes by what its two points do, each by its share of rows;
    where the point that would look again is no better any more, there is none.

    Args:
        spec: as it was asked for.
        accuracies: by stage, variant and operating point.
    """
    if not accuracies:
        return spec
    stages = []
    for stage in spec.stages:
        variants = []
        for variant in stage.variants:
            own = {point: now for (s, v, point), now in accuracies.items() if (s, v) == (stage.name, variant.name)}
            variants.append(_variant(variant, own) if own else variant)
        stages.append(stage.model_copy(update={"variants": tuple(variants)}))
    return _with(spec, stages)


def with_joined(
    spec: InferencePipelineSpec, joined: Mapping[tuple[str, str, str], Mapping[str, float]]
) -> InferencePipelineSpec:
    """Count with tasks that joined as with those that were there: no point is left out that is the best for one.

    Args:
        spec: as it was asked for.
        joined: by stage, variant and operating point, how accurate that one is on each task.
    """
    if not joined:
        return spec
    stages = []
    for stage in spec.stages:
        variants = []
        for variant in stage.variants:
            points = tuple(
                point.model_copy(update={"accuracy_by_task": _told(more) | point.accuracy_by_task}) if more else point
                for point in variant.operating_points
                for more in [joined.get((stage.name, variant.name, point.name))]
            )
            variants.append(variant.model_copy(update={"operating_points": points}))
        stages.append(stage.model_copy(update={"variants": tuple(variants)}))
    return _with(spec, stages)


def _with(spec: InferencePipelineSpec, stages: Sequence[Stage]) -> InferencePipelineSpec:
    """A spec with other stages, validated anew: copies keep what was computed of the originals."""
    return InferencePipelineSpec.model_validate(
        spec.model_copy(update={"stages": tuple(stages)}).model_dump(by_alias=True)
    )


def _told(by_task: Mapping[str, float]) -> dict[str, Accuracy]:
    return {task: Accuracy(value=accuracy, source="Measured") for task, accuracy in by_task.items()}


def drifts(asked: InferencePipelineSpec, counted: InferencePipelineSpec) -> tuple[str, ...]:
    """Say which points count with another accuracy than was asked."""
    return tuple(
        f"{stage.name}: {variant.name}/{point.name}, {now.accuracy:.2f} and not {point.accuracy:.2f}"
        for stage, other in zip(asked.stages, counted.stages, strict=True)
        for variant, its in zip(stage.variants, other.variants, strict=True)
        for point, now in zip(variant.points, its.points, strict=True)
        if point.accuracy != now.accuracy
    )


def _variant(variant: Variant, own: Mapping[str, float]) -> Variant:
    now = {point.name: own.get(point.name, point.accuracy) for point in variant.points}
    change = {point.name: now[point.name] - point.accuracy for point in variant.points}
    if not variant.operating_points:
        by = change.get("default", 0.0)
        evidence = _along(variant.accuracy_evidence, by)
        return variant.model_copy(update={"accuracy": _moved(variant.accuracy, by), "accuracy_evidence": evidence})
    points = tuple(_point(point, now, change) for point in variant.operating_points)
    return variant.model_copy(update={"operating_points": points})


def _point(point: OperatingPoint, now: Mapping[str, float], change: Mapping[str, float]) -> OperatingPoint:
    own = change[point.name]
    evidence = None if point.accuracy_evidence is None else _along(point.accuracy_evidence, own)
    looks = [look for look in point.second_looks if now[look.point] > now[point.name]]
    moved = tuple(_look(look, own, change[look.point]) for look in looks)
    return point.model_copy(
        update={"accuracy": _moved(point.accuracy, own), "accuracy_evidence": evidence, "second_looks": moved}
    )


def _look(look: SecondLook, first: float, then: float) -> SecondLook:
    """A second look once the accuracies of its two points have changed by so much."""
    return _shifted(look, first, then).model_copy(
        update={"by_task": {task: _shifted(own, first, then) for task, own in look.by_task.items()}}
    )


def _shifted(look: _Looked, first: float, then: float) -> _Looked:
    by = (1 - look.share) * first + look.share * then
    low = None if look.low is None else _moved(look.low, by)
    return look.model_copy(update={"accuracy": _moved(look.accuracy, by), "low": low})


def _along(evidence: AccuracyEvidence, by: float) -> AccuracyEvidence:
    ends = {"low": evidence.low, "high": evidence.high}
    return evidence.model_copy(update={end: _moved(value, by) for end, value in ends.items() if value is not None})


def _moved(value: float, by: float) -> float:
    return min(max(value + by, 0.0), 1.0)
