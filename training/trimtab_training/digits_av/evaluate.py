"""What the networks are worth on items they were not trained on: each subset's accuracy, confidence, second looks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from trimtab_model_servers.families.digits_av import SUBSETS, subset_name
from trimtab_model_servers.families.digits_av.calibration import Calibration, apply_calibration, identity_calibration
from trimtab_model_servers.families.digits_av.variants import Network
from trimtab_pipelines.accuracy_evidence import Accuracy, mean_confidence
from trimtab_pipelines.confidence import ConfidenceSample, PairedConfidence, escalation_curve, escalations
from trimtab_pipelines.training_report import ConfidenceCurve, MeasuredOn, MeasuredPoint
from trimtab_training.confidence_fitting import best_temperature, calibration_error, fitted_curve
from trimtab_training.digits.evaluate import wilson
from trimtab_training.digits_av.dataset import Items
from trimtab_training.digits_av.train_loops import scores

SHARES: Final = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
ALL: Final = SUBSETS[-1]
Subset = tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Items as a network scored them, before any calibration.

    Attributes:
        digits: the truth, int64 [n].
        logits: of each subset, float32 [n, 10].
    """

    digits: Tensor
    logits: Mapping[Subset, Tensor]

    @classmethod
    def of(cls, network: Network, items: Items) -> "Scored":
        """Score items."""
        return cls(torch.from_numpy(items.digit), scores(network, items))

    @classmethod
    def joined(cls, several: Iterable["Scored"]) -> "Scored":
        """Put several together, in order."""
        found = tuple(several)
        logits = {subset: torch.cat([one.logits[subset] for one in found]) for subset in SUBSETS}
        return cls(torch.cat([one.digits for one in found]), logits)

    def calibrations(self) -> dict[Subset, Calibration]:
        """The calibration of each subset that fits these items best."""
        return {subset: self._calibration(subset) for subset in SUBSETS}

    def _calibration(self, subset: Subset) -> Calibration:
        temperature = best_temperature(self.logits[subset], self.digits)
        seen = self._seen(subset, Calibration(temperature, identity_calibration()))
        return Calibration(temperature, fitted_curve(seen.confidence, seen.right))

    def seen(self, by: Mapping[Subset, Calibration]) -> dict[Subset, ConfidenceSample]:
        """How certain of each item each subset is, and whether rightly."""
        return {subset: self._seen(subset, by[subset]) for subset in SUBSETS}

    def _seen(self, subset: Subset, by: Calibration) -> ConfidenceSample:
        probability, digit = (self.logits[subset] / by.temperature).softmax(dim=1).max(dim=1)
        confidence = apply_calibration(torch.from_numpy(by.knots), probability)
        return ConfidenceSample(confidence.numpy(), (digit == self.digits).numpy(), frozenset(subset))


def concatenate(several: Iterable[Mapping[Subset, ConfidenceSample]]) -> dict[Subset, ConfidenceSample]:
    """Join what was seen of several sets of items."""
    found = tuple(several)
    return {
        subset: ConfidenceSample(
            np.concatenate([one[subset].confidence for one in found]),
            np.concatenate([one[subset].right for one in found]),
            frozenset(subset),
        )
        for subset in SUBSETS
    }


def measurement_document(what: str, seen: Mapping[Subset, ConfidenceSample]) -> MeasuredOn:
    """Describe what was measured, as `measured.json` holds it."""
    return MeasuredOn(
        description=what,
        samples=seen[ALL].right.size,
        points=tuple(_point(subset, seen[subset]) for subset in SUBSETS),
        curves=tuple(_curve(less, more, seen) for less in SUBSETS for more in SUBSETS if set(less) < set(more)),
        escalations=escalations({subset_name(subset): one for subset, one in seen.items()}),
    )


def _point(subset: Subset, seen: ConfidenceSample) -> MeasuredPoint:
    found = wilson(int(seen.right.sum()), seen.right.size)
    return MeasuredPoint(
        point=subset_name(subset),
        modalities=subset,
        accuracy=Accuracy(
            source="Measured",
            samples=found.n,
            value=round(found.value, 4),
            low=round(found.low, 4),
            high=round(found.high, 4),
            mean_confidence=mean_confidence(seen.confidence.tolist()),
        ),
        calibration_error=round(calibration_error(seen.confidence, seen.right), 4),
    )


def _curve(less: Subset, more: Subset, seen: Mapping[Subset, ConfidenceSample]) -> ConfidenceCurve:
    looks = PairedConfidence(seen[less].confidence, seen[less].right, seen[more].right)
    found = escalation_curve(looks, SHARES)
    return ConfidenceCurve(
        first=subset_name(less),
        then=subset_name(more),
        shares=tuple(round(look.share, 4) for look in found),
        accuracies=tuple(round(look.accuracy, 4) for look in found),
    )
