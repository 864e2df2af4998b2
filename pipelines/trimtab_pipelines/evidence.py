"""How often a model is right, and what stands behind the figure."""

from typing import Literal, Self

from pydantic import Field, model_validator

from trimtab_pipelines.quantity import Fraction
from trimtab_pipelines.resource import Model

AccuracyBasis = Literal["Expected", "LowerBound"]
"""Which figure of an accuracy counts: its value, or the lower end of its interval where one is known."""


class AccuracyEvidence(Model):
    """Where an accuracy comes from."""

    source: Literal["Measured", "Published", "Declared"] = "Declared"
    samples: int | None = Field(default=None, gt=0, description="Held-out samples behind the figure")
    low: Fraction | None = Field(default=None, description="Lower end of the 95 % interval")
    high: Fraction | None = Field(default=None, description="Upper end of the 95 % interval")


class Accuracy(AccuracyEvidence):
    """An accuracy with its evidence."""

    value: Fraction = Field(description="Share of right answers, between 0 and 1")

    def on(self, basis: AccuracyBasis) -> float:
        """The figure that counts."""
        return self.low if basis == "LowerBound" and self.low is not None else self.value

    @model_validator(mode="after")
    def _within(self) -> Self:
        low, high = self.low or 0.0, 1.0 if self.high is None else self.high
        if not low <= self.value <= high:
            raise ValueError(f"accuracy {self.value:g} is outside of its interval, low {low:g} to high {high:g}")
        return self


def stated(accuracy: float, evidence: AccuracyEvidence | None) -> Accuracy:
    """An accuracy together with the evidence that stands beside it; without any it is only declared."""
    known = (evidence or AccuracyEvidence()).model_dump(by_alias=False)
    return Accuracy(value=accuracy, **known)
