"""How often a model is right, and what stands behind the figure."""

import math
from collections.abc import Iterable
from typing import Literal, Self

from pydantic import Field, model_validator

from trimtab_pipelines.quantity import Fraction
from trimtab_pipelines.resource import Model

AccuracyBasis = Literal["Expected", "LowerBound"]
"""Which figure of an accuracy counts: its value, or the lower end of its interval where one is known."""


def accuracy_on_basis(basis: AccuracyBasis, value: float, low: float | None) -> float:
    """The figure of an accuracy that counts."""
    return low if basis == "LowerBound" and low is not None else value


AccuracySource = Literal["Measured", "Published", "Declared", "Agreement"]
"""Agreement: how often a form of a model answers as the model itself, on samples without right answers."""
AGREEMENT = "agreement with the model as it is"


class AccuracyEvidence(Model):
    """Where an accuracy comes from."""

    source: AccuracySource = Field(
        default="Declared",
        description="Measured on right answers, Published, Declared, or Agreement: the share of samples without right "
        "answers that are answered as by the model as it is",
    )
    samples: int | None = Field(default=None, gt=0, description="Held-out samples behind the figure")
    low: Fraction | None = Field(default=None, description="Lower end of the 95 % interval")
    high: Fraction | None = Field(default=None, description="Upper end of the 95 % interval")
    samples_digest: str | None = Field(
        default=None,
        pattern=r"^sha256:[0-9a-f]{64}$",
        exclude_if=lambda digest: digest is None,
        description="SHA-256 of the samples that it was measured_accuracy on",
    )
    mean_confidence: Fraction | None = Field(
        default=None,
        exclude_if=lambda confidence: confidence is None,
        description="Mean confidence of the model on these samples, of a stage that tells one; by what it changes, "
        "drifts are told; without it none are",
    )

    @property
    def source_label(self) -> str:
        """The source as it is shown."""
        return AGREEMENT if self.source == "Agreement" else self.source.lower()


class Accuracy(AccuracyEvidence):
    """An accuracy with its evidence."""

    value: Fraction = Field(description="Share of right answers, between 0 and 1")

    def on(self, basis: AccuracyBasis) -> float:
        """The figure that counts."""
        return accuracy_on_basis(basis, self.value, self.low)

    @property
    def evidence_label(self) -> str:
        """Say in a few words what stands behind it."""
        details = [f"n {self.samples}"] if self.samples is not None else []
        if self.low is not None and self.high is not None:
            details.append(f"{self.low:.3f}–{self.high:.3f}")
        return self.source_label + (f" ({', '.join(details)})" if details else "")

    @model_validator(mode="after")
    def _within(self) -> Self:
        low, high = self.low or 0.0, 1.0 if self.high is None else self.high
        if not low <= self.value <= high:
            raise ValueError(f"accuracy {self.value:g} is outside of its interval, low {low:g} to high {high:g}")
        return self


_Z_95 = 1.959964


def wilson_interval(right: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of `right` out of `n` (Wilson 1927): its ends, within 0…1 and around the share.

    Raises:
        ValueError: `n` is not positive.
    """
    if n <= 0:
        raise ValueError(f"no accuracy of {n:g} answers: n should be positive")
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
    """What was measured_accuracy on so many held-out samples, with Wilson's interval, rounded outwards.

    Args:
        right: how many were answered rightly.
        n: how many there were.
        confidences: of each, where the model tells them.
        samples_digest: of the samples.
        source: what rightly means.

    Raises:
        ValueError: `n` is not positive.
    """
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
    """How certain a model was of some rows, as a mean.

    Args:
        confidences: of each row.
        tasks: of the rows, as far as these are told apart.

    Returns:
        None where not each is told as a probability. None where rows are of several tasks, too: of which mix of them
        rows will be that name none, nobody knows.
    """
    told = list(confidences)
    if not told or len(set(tasks)) > 1 or not all(0.0 <= one <= 1.0 for one in told):
        return None
    return round(math.fsum(told) / len(told), 4)


def declared_accuracy(accuracy: float, evidence: AccuracyEvidence | None) -> Accuracy:
    """An accuracy together with the evidence that stands beside it; without any it is only declared."""
    known = (evidence or AccuracyEvidence()).model_dump(by_alias=False)
    return Accuracy(value=accuracy, **known)
