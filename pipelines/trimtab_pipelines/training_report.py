"""What was measured of operating points on held-out items: the document `measured.json` beside a pipeline."""

from typing import Self

from pydantic import Field, model_validator

from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.escalation import Escalation
from trimtab_pipelines.quantity import Fraction
from trimtab_pipelines.resource import Model, Name
from trimtab_pipelines.tensors import TensorName


class MeasuredPoint(Model):
    """One operating point."""

    point: Name
    modalities: tuple[TensorName, ...] = Field(min_length=1, max_length=16)
    accuracy: Accuracy
    calibration_error: Fraction = Field(
        description="Mean gap between how certain it is and how often it is right, in 15 bins of equal width"
    )


class ConfidenceCurve(Model):
    """The accuracy of all rows when the least certain share of them is answered again at another point."""

    first: Name = Field(description="Operating point that sees all rows")
    then: Name = Field(description="Operating point that sees the least certain of them again")
    shares: tuple[Fraction, ...] = Field(min_length=2, max_length=1024, description="Ascending, from none to all")
    accuracies: tuple[Fraction, ...] = Field(min_length=2, max_length=1024)

    @model_validator(mode="after")
    def _one_accuracy_a_share(self) -> Self:
        if len(self.shares) != len(self.accuracies):
            raise ValueError(
                f"curve {self.first} to {self.then}: {len(self.shares)} shares but {len(self.accuracies)} accuracies"
            )
        if list(self.shares) != sorted(self.shares):
            raise ValueError(f"curve {self.first} to {self.then}: shares must ascend")
        return self


class MeasuredOn(Model):
    """All points of a variant on one kind of items."""

    description: str = Field(min_length=1, max_length=1024, description="Which items, and what of them was held out")
    samples: int = Field(gt=0)
    points: tuple[MeasuredPoint, ...] = Field(min_length=1, max_length=64)
    curves: tuple[ConfidenceCurve, ...] = Field(default=(), max_length=4096)
    escalations: dict[Name, tuple[Escalation, ...]] = Field(
        default_factory=dict, max_length=64, description="By operating point, at thresholds whose floors are tested"
    )

    def point(self, name: str) -> MeasuredPoint:
        """Return what was measured of a point; KeyError names the ones there are."""
        for point in self.points:
            if point.point == name:
                return point
        raise KeyError(f"nothing was measured of point {name!r}; there are: {', '.join(p.point for p in self.points)}")

    @property
    def worst(self) -> MeasuredPoint:
        """The least accurate point."""
        return min(self.points, key=lambda point: point.accuracy.value)


class MeasuredVariant(Model):
    """One variant, on each kind of items by its name."""

    name: Name
    on: dict[Name, MeasuredOn] = Field(min_length=1, max_length=16)
    temperatures: dict[Name, float] = Field(default_factory=dict, max_length=64, description="By operating point")
    primary: Name = Field(description="Which of these kinds the pipeline's accuracies are of")
    training: dict[str, float] = Field(default_factory=dict, max_length=64, description="Seeds, steps, seconds, bytes")

    @property
    def primary_results(self) -> MeasuredOn:
        """What was measured on the kind that counts."""
        return self.on[self.primary]

    @model_validator(mode="after")
    def _require_known_primary(self) -> Self:
        if self.primary not in self.on:
            raise ValueError(f"variant {self.name}: primary {self.primary!r} is not one of: {', '.join(self.on)}")
        return self


class MeasuredPipeline(Model):
    """The document."""

    variants: tuple[MeasuredVariant, ...] = Field(min_length=1, max_length=64)

    def variant(self, name: str) -> MeasuredVariant:
        """Return what was measured of a variant; KeyError names the ones there are."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        known = ", ".join(one.name for one in self.variants)
        raise KeyError(f"nothing was measured of variant {name!r}; there are: {known}")
