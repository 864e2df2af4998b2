"""Training report: operating points measured on held-out samples, the file `measured.json` of a pipeline."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

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
    modalities: tuple[TensorName, ...] = Field(min_length=1, max_length=16)
    accuracy: Accuracy
    calibration_error: Fraction
    """Mean difference of confidence and accuracy, in 15 bins of equal width."""


class MeasuredOn(Model):
    """Results of a variant on one kind of samples."""

    description: str = Field(min_length=1, max_length=1024)
    """Description of the samples, and of how they were held out."""
    samples: int = Field(gt=0)
    points: tuple[MeasuredPoint, ...] = Field(min_length=1, max_length=64)
    escalations: dict[Name, tuple[Escalation, ...]] = Field(default_factory=dict, max_length=64)
    """Escalations of each operating point, at thresholds with tested floors."""

    def point(self, name: str) -> MeasuredPoint:
        """Return the results of a point; KeyError lists the measured points."""
        for point in self.points:
            if point.point == name:
                return point
        raise KeyError(f"no results for point {name!r}; measured points: {', '.join(p.point for p in self.points)}")


class MeasuredVariant(Model):
    """Results of a variant, by kind of samples."""

    name: Name
    on: dict[Name, MeasuredOn] = Field(min_length=1, max_length=16)
    temperatures: dict[Name, float] = Field(default_factory=dict, max_length=64)
    """Calibration temperature of each operating point."""
    primary: Name
    """The kind of samples that the pipeline's accuracies refer to."""
    training: dict[str, float] = Field(default_factory=dict, max_length=64)
    """Seeds, steps, seconds and bytes."""

    @property
    def primary_results(self) -> MeasuredOn:
        return self.on[self.primary]

    @model_validator(mode="after")
    def _require_known_primary(self) -> Self:
        if self.primary not in self.on:
            raise ValueError(f"variant {self.name}: primary {self.primary!r} is not one of: {', '.join(self.on)}")
        return self


class MeasuredPipeline(Model):
    """The report of a pipeline."""

    variants: tuple[MeasuredVariant, ...] = Field(min_length=1, max_length=64)

    def variant(self, name: str) -> MeasuredVariant:
        """Return the results of a variant; KeyError lists the measured variants."""
        return find_named(self.variants, name, "the report has no variant")


def write_points(path: Path, measured: MeasuredPipeline) -> None:
    """Replace accuracies and escalations of the measured variants' operating points in a pipeline file."""
    stage = load_pipeline(path).spec.stages[0].name
    accuracies, by_kind, escalations = {}, {}, {}
    for variant in measured.variants:
        primary = variant.primary_results
        for point in primary.points:
            key = (stage, variant.name, point.point)
            accuracies[key] = point.accuracy
            by_kind[key] = {kind: on.point(point.point).accuracy for kind, on in sorted(variant.on.items())}
            escalations[key] = primary.escalations.get(point.point, ())
    text = with_accuracies(path.read_text(encoding="utf-8"), accuracies, by_kind)
    write_atomically(path, with_escalations(text, escalations))
