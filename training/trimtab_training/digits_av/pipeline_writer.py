"""Writes what was measured into the pipeline: `operatingPoints` of each variant, the rest of the file as it stands."""

import re
from collections.abc import Iterator
from pathlib import Path

from trimtab_model_servers.families.digits_av import MODALITIES
from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.documents import write_atomically
from trimtab_pipelines.escalation import Escalation
from trimtab_pipelines.training_report import MeasuredOn, MeasuredPipeline, MeasuredVariant

_VARIANT = re.compile(r"^    - name: ([\w.-]+)")
_ACCURACY = re.compile(r"^      accuracy: ")
_POINTS = re.compile(r"^      operatingPoints:")
_OF_A_POINT = re.compile(r"^      - |^        ")


def write_points(path: Path, measured: MeasuredPipeline) -> None:
    """Replace accuracy and operating points of every variant that was measured."""
    known = {variant.name: variant for variant in measured.variants}
    write_atomically(path, "\n".join(_lines(path.read_text().splitlines(), known)) + "\n")


def _lines(lines: list[str], known: dict[str, MeasuredVariant]) -> Iterator[str]:
    variant: MeasuredVariant | None = None
    within = False
    for line in lines:
        if within and _OF_A_POINT.match(line):
            continue
        within = False
        named = _VARIANT.match(line)
        if named:
            variant = known.get(named[1])
        if variant is not None and _ACCURACY.match(line):
            yield f"      accuracy: {variant.primary_results.point('all').accuracy.value:g}"
            continue
        yield line
        if variant is not None and _POINTS.match(line):
            within = True
            yield from _points(variant)


def _points(variant: MeasuredVariant) -> Iterator[str]:
    counted = variant.primary_results
    for point in sorted(counted.points, key=lambda one: -len(one.modalities)):
        yield f"      - name: {point.point}"
        if len(point.modalities) < len(MODALITIES):
            yield f"        modalities: [{', '.join(point.modalities)}]"
        yield f"        accuracy: {point.accuracy.value:g}"
        yield f"        accuracyEvidence: {_evidence(point.accuracy)}"
        yield "        accuracyByTask:"
        for kind, on in sorted(variant.on.items()):
            own = on.point(point.point).accuracy
            yield f"          {kind}: {{value: {own.value:g}, {_evidence(own)[1:]}"
        yield from _looks(counted, point.point)


def _looks(counted: MeasuredOn, point: str) -> Iterator[str]:
    looks = counted.escalations.get(point, ())
    if looks:
        yield "        escalations:"
    for look in looks:
        yield f"        - {_look(look)}"


def _evidence(accuracy: Accuracy) -> str:
    bounds = f"low: {accuracy.low:g}, high: {accuracy.high:g}, meanConfidence: {accuracy.mean_confidence:g}"
    return f"{{source: Measured, samples: {accuracy.samples}, {bounds}}}"


def _look(look: Escalation) -> str:
    figures = f"share: {look.share:g}, accuracy: {look.accuracy:g}, accuracyLow: {look.accuracy_low:g}"
    return f"{{to: {look.to}, confidenceBelow: {look.confidence_below:g}, {figures}, samples: {look.samples}}}"
