"""Report of digits-av, `measured.json`: operating points measured on held-out items, by kind of items."""

from pathlib import Path

from pydantic import Field

from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.documents import load_pipeline, write_atomically
from trimtab_pipelines.escalation import Escalation
from trimtab_pipelines.quantity import Fraction
from trimtab_pipelines.resource import Model, Name, find_named
from trimtab_pipelines.tensors import TensorName
from trimtab_pipelines.yaml_edit import with_accuracies, with_escalations


class MeasuredPoint(Model):
    """Results of one operating point."""

    point: Name
    modalities: tuple[TensorName, ...]
    accuracy: Accuracy
    calibration_error: Fraction
    """Mean difference of confidence and accuracy, in 15 bins of equal width."""


class MeasuredOn(Model):
    """Results of a variant on one kind of items."""

    description: str
    """Description of the items, and of how they were held out."""
    samples: int
    points: tuple[MeasuredPoint, ...]
    escalations: dict[Name, tuple[Escalation, ...]] = Field(default_factory=dict)
    """Escalations of each operating point, at thresholds with tested floors."""

    def point(self, name: str) -> MeasuredPoint:
        return next(point for point in self.points if point.point == name)


class MeasuredVariant(Model):
    """Results of a variant, by kind of items."""

    name: Name
    on: dict[Name, MeasuredOn]
    temperatures: dict[Name, float]
    """Calibration temperature of each operating point."""
    primary: Name
    """The kind of items that the pipeline's accuracies refer to."""
    training: dict[str, float]
    """Seeds, steps, seconds and bytes."""

    @property
    def primary_results(self) -> MeasuredOn:
        return self.on[self.primary]


class MeasuredPipeline(Model):
    """The report of a pipeline."""

    variants: tuple[MeasuredVariant, ...]

    def variant(self, name: str) -> MeasuredVariant:
        return find_named(self.variants, name, "the report has no variant")


def write_points(path: Path, measured: MeasuredPipeline) -> None:
    """Replace accuracies and escalations of the measured variants' operating points in a pipeline file."""
    stage = load_pipeline(path).spec.stages[0].name
    accuracies, by_kind, escalations = {}, {}, {}
    for variant in measured.variants:
        for point in variant.primary_results.points:
            key = (stage, variant.name, point.point)
            accuracies[key] = point.accuracy
            by_kind[key] = {kind: on.point(point.point).accuracy for kind, on in sorted(variant.on.items())}
            escalations[key] = variant.primary_results.escalations.get(point.point, ())
    text = with_accuracies(path.read_text(encoding="utf-8"), accuracies, by_kind)
    write_atomically(path, with_escalations(text, escalations))
