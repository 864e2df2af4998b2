"""Evaluation of digits-av networks on held-out items: accuracy, calibration and escalations of each modality subset."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from trimtab_model_servers.families.digits_av import SUBSETS, subset_name
from trimtab_model_servers.families.digits_av.base import (
    Calibration,
    apply_calibration,
    identity_calibration,
    select_modalities,
)
from trimtab_model_servers.families.digits_av.family import Network
from trimtab_pipelines.accuracy_evidence import measured_accuracy
from trimtab_pipelines.escalation_thresholds import ConfidenceSample, measure_escalations
from trimtab_training.confidence_fitting import best_temperature, calibration_error, fitted_curve
from trimtab_training.digits_av.dataset import Items
from trimtab_training.digits_av.report import MeasuredOn, MeasuredPoint

ALL: Final = SUBSETS[-1]
Subset = tuple[str, ...]
Samples = Mapping[Subset, ConfidenceSample]
Inputs = dict[str, Tensor]


def to_tensors(items: Items) -> tuple[Inputs, Tensor]:
    return {name: torch.from_numpy(array) for name, array in items.inputs().items()}, torch.from_numpy(items.digit)


def compute_logits(network: Network, items: Items, batch: int = 128) -> dict[tuple[str, ...], Tensor]:
    """Uncalibrated logits [n, 10] of all items, by modality subset."""
    inputs, _ = to_tensors(items)
    with torch.inference_mode():
        return {
            subset: torch.cat([network.logits(select_modalities(part, subset)) for part in _split(inputs, batch)])
            for subset in SUBSETS
        }


def _split(inputs: Inputs, size: int) -> Iterator[Inputs]:
    count = len(next(iter(inputs.values())))
    return ({name: tensor[start : start + size] for name, tensor in inputs.items()} for start in range(0, count, size))


@dataclass(frozen=True, slots=True, eq=False)
class ScoredItems:
    """Uncalibrated logits of items, by modality subset."""

    digits: Tensor
    """Labels, int64 [n]."""
    logits: Mapping[Subset, Tensor]
    """float32 [n, 10] each."""

    @classmethod
    def of(cls, network: Network, items: Items) -> "ScoredItems":
        return cls(torch.from_numpy(items.digit), compute_logits(network, items))

    @classmethod
    def concatenate(cls, parts: Iterable["ScoredItems"]) -> "ScoredItems":
        parts = tuple(parts)
        logits = {subset: torch.cat([part.logits[subset] for part in parts]) for subset in SUBSETS}
        return cls(torch.cat([part.digits for part in parts]), logits)

    def fit_calibrations(self) -> dict[Subset, Calibration]:
        """Fit each subset's calibration to these items."""
        return {subset: self._fit_calibration(subset) for subset in SUBSETS}

    def calibrated(self, calibrations: Mapping[Subset, Calibration]) -> dict[Subset, ConfidenceSample]:
        """Calibrated confidence and correctness of each item, by subset."""
        return {subset: self._calibrated(subset, calibrations[subset]) for subset in SUBSETS}

    def _fit_calibration(self, subset: Subset) -> Calibration:
        temperature = best_temperature(self.logits[subset], self.digits)
        sample = self._calibrated(subset, Calibration(temperature, identity_calibration()))
        return Calibration(temperature, fitted_curve(sample.confidence, sample.right))

    def _calibrated(self, subset: Subset, calibration: Calibration) -> ConfidenceSample:
        probability, digit = (self.logits[subset] / calibration.temperature).softmax(dim=1).max(dim=1)
        confidence = apply_calibration(torch.from_numpy(calibration.knots), probability)
        return ConfidenceSample(confidence.numpy(), (digit == self.digits).numpy(), frozenset(subset))


def concatenate_samples(parts: Iterable[Samples]) -> dict[Subset, ConfidenceSample]:
    parts = tuple(parts)
    return {
        subset: ConfidenceSample(
            np.concatenate([part[subset].confidence for part in parts]),
            np.concatenate([part[subset].right for part in parts]),
            frozenset(subset),
        )
        for subset in SUBSETS
    }


def measurement_document(description: str, samples: Samples) -> MeasuredOn:
    """Accuracies and escalations, as `measured.json` holds them."""
    return MeasuredOn(
        description=description,
        samples=samples[ALL].right.size,
        points=tuple(_point(subset, samples[subset]) for subset in SUBSETS),
        escalations=measure_escalations({subset_name(subset): sample for subset, sample in samples.items()}),
    )


def _point(subset: Subset, sample: ConfidenceSample) -> MeasuredPoint:
    return MeasuredPoint(
        point=subset_name(subset),
        modalities=subset,
        accuracy=measured_accuracy(int(sample.right.sum()), sample.right.size, sample.confidence.tolist()),
        calibration_error=round(calibration_error(sample.confidence, sample.right), 4),
    )
