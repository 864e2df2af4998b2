"""Writer of measured accuracies and escalations into a pipeline file, whose operating points and comments stay."""

from pathlib import Path

from trimtab_pipelines.documents import load_pipeline, write_atomically
from trimtab_pipelines.yaml_edit import with_accuracies, with_escalations
from trimtab_training.training_report import MeasuredPipeline


def write_points(path: Path, measured: MeasuredPipeline) -> None:
    """Replace accuracies and escalations of the measured variants' operating points."""
    stage = load_pipeline(path).spec.stages[0].name
    points = [(variant, point) for variant in measured.variants for point in variant.primary_results.points]
    keys = [(stage, variant.name, point.point) for variant, point in points]
    accuracies = {key: point.accuracy for key, (_, point) in zip(keys, points, strict=True)}
    by_kind = {
        key: {kind: on.point(point.point).accuracy for kind, on in sorted(variant.on.items())}
        for key, (variant, point) in zip(keys, points, strict=True)
    }
    escalations = {
        key: variant.primary_results.escalations.get(point.point, ())
        for key, (variant, point) in zip(keys, points, strict=True)
    }
    text = with_accuracies(path.read_text(encoding="utf-8"), accuracies, by_kind)
    write_atomically(path, with_escalations(text, escalations))
