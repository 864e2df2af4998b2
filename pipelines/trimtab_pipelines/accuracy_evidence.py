"""Accuracies with their evidence: source, samples and confidence interval."""

import math
from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trimtab_pipelines.quantity import Fraction
from trimtab_pipelines.resource import Model, Name, is_empty

AccuracyBasis = Literal["Expected", "LowerBound"]
"""Which figure of an accuracy is used: its value, or the lower end of its interval if known."""


def accuracy_on_basis(basis: AccuracyBasis, value: float, low: float | None) -> float:
    return low if basis == "LowerBound" and low is not None else value


AccuracySource = Literal["Measured", "Published", "Declared", "Agreement"]
"""Agreement is the share of samples without labels on which a model gives the same result as a heavier one: a compiled
or quantized form as the original model, or a variant as the most accurate variant.
"""
DIGESTS = {"samples_digest", "model_digest"}
MAX_CLASSES = 64
"""Of an output whose mix is evidence."""
AGREEMENT = "agreement with a heavier model"


class AccuracyEvidence(Model):
    """Evidence for an accuracy."""

    source: AccuracySource = "Declared"
    """Measured on labelled samples, Published, Declared, or Agreement: the share of unlabelled samples with the same
    result as the original model, or as the most accurate variant.
    """
    samples: int | None = Field(default=None, gt=0)
    """Number of held-out samples."""
    low: Fraction | None = None
    """Lower end of the 95 % confidence interval."""
    high: Fraction | None = None
    """Upper end of the 95 % confidence interval."""
    samples_digest: str | None = Field(
        default=None, pattern=r"^sha256:[0-9a-f]{64}$", exclude_if=lambda digest: digest is None
    )
    """SHA-256 of the samples."""
    model_digest: str | None = Field(
        default=None, pattern=r"^sha256:[0-9a-f]{64}$", exclude_if=lambda digest: digest is None
    )
    """SHA-256 of the family, code, parameters and weights that were measured."""
    mean_confidence: Fraction | None = Field(default=None, exclude_if=lambda confidence: confidence is None)
    """Mean confidence of the model on these samples, for stages with a confidence output. Accuracy drift is detected
    from its change.
    """
    confidence_shifts: dict[Name, Annotated[float, Field(ge=-1, le=1)]] = Field(
        default_factory=dict, max_length=64, exclude_if=is_empty
    )
    """By later stage: how much its mean confidence changes if this model, not the best one, gives its inputs."""
    output_shares: dict[str, Fraction] = Field(default_factory=dict, max_length=MAX_CLASSES, exclude_if=is_empty)
    """Shares of the rows by their class, the value of the stage's first integer output. A changed mix is reported."""

    @property
    def source_label(self) -> str:
        return AGREEMENT if self.source == "Agreement" else self.source.lower()


class Accuracy(AccuracyEvidence):
    """An accuracy with its evidence."""

    value: Fraction
    """Share of correct responses, between 0 and 1."""

    def on(self, basis: AccuracyBasis) -> float:
        """The figure to use for a basis."""
        return accuracy_on_basis(basis, self.value, self.low)

    @property
    def evidence_label(self) -> str:
        details = [f"n {self.samples}"] if self.samples is not None else []
        if self.low is not None and self.high is not None:
            details.append(f"{self.low:.3f}–{self.high:.3f}")
        return self.source_label + (f" ({', '.join(details)})" if details else "")

    @model_validator(mode="after")
    def _within(self) -> Self:
        low, high = self.low or 0.0, 1.0 if self.high is None else self.high
        if not low <= self.value <= high:
            raise ValueError(f"accuracy {self.value:g} is outside its interval, low {low:g} to high {high:g}")
        return self


_Z_95 = 1.959964


def wilson_interval(right: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of `right` out of `n` (Wilson 1927), within 0…1 and around the share.

    Raises ValueError if `n` is not positive.
    """
    if n <= 0:
        raise ValueError(f"n must be positive; got {n:g}")
    share, spread = right / n, _Z_95**2 / n
    middle = (share + spread / 2) / (1 + spread)
    reach = _Z_95 / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    low, high = max(0.0, middle - reach), min(1.0, middle + reach)
    return min(low, share), max(high, share)  # rounding may put an end a hair beyond the share


def measured_accuracy(
    right: int,
    n: int,
    confidences: Iterable[float] = (),
    samples_digest: str | None = None,
    source: AccuracySource = "Measured",
) -> Accuracy:
    """Accuracy of n held-out samples, with Wilson's interval, rounded outwards; ValueError if n is not positive."""
    low, high = wilson_interval(right, n)
    return Accuracy(
        value=round(right / n, 4),
        source=source,
        samples=n,
        low=math.floor(1e4 * low) / 1e4,
        high=min(1.0, math.ceil(1e4 * high) / 1e4),
        samples_digest=samples_digest,
        mean_confidence=mean_confidence(confidences),
    )


def mean_confidence(confidences: Iterable[float], tasks: Iterable[str] = ()) -> float | None:
    """Mean confidence of a model on some rows; None if a confidence is not a probability.

    It is also None for rows of several tasks, since the mix of tasks in future rows is unknown.
    """
    values = list(confidences)
    if not values or len(set(tasks)) > 1 or not all(0.0 <= value <= 1.0 for value in values):
        return None
    return round(math.fsum(values) / len(values), 4)


def declared_accuracy(accuracy: float, evidence: AccuracyEvidence | None) -> Accuracy:
    """Combine an accuracy with its evidence; without evidence it is only declared."""
    fields = (evidence or AccuracyEvidence()).model_dump(by_alias=False)
    return Accuracy(value=accuracy, **fields)
