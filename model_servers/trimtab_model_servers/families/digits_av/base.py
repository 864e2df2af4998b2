"""Base of the digits-av networks: modality subsets, calibrated confidence and the common interface.

Nothing is computed for an absent modality. Each of the seven subsets has its own calibration, fitted after training.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trimtab_model_servers.families.digits_av import MODALITIES, SUBSETS
from trimtab_pipelines.operating_point import OperatingPoint

KNOTS: Final = 24
"""Knots of a stored curve, its ends included."""
BANDS: Final = 24
STEPS: Final = 40
_HOP, _WINDOW = 160, 256
_LOWEST_HZ, _RATE_HZ = 80.0, 8000
CHARACTER_CODES: Final = 32
"""The last five bits of an ASCII letter number it from 1; padding is 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Map from one subset's scores to a confidence."""

    temperature: float
    """Divisor of the scores."""
    knots: NDArray[np.float32]
    """[2, KNOTS]: largest probabilities and their accuracies, both rising, linear between."""


def identity_calibration() -> NDArray[np.float32]:
    return np.tile(np.linspace(0.0, 1.0, KNOTS, dtype=np.float32), (2, 1))


def apply_calibration(knots: Tensor, confidence: Tensor) -> Tensor:
    """Map confidences [B] along a curve [2, KNOTS]."""
    x, y = knots.contiguous()
    left = torch.searchsorted(x, confidence.contiguous(), right=True).clamp(1, KNOTS - 1) - 1
    share = (confidence - x[left]) / (x[left + 1] - x[left]).clamp(min=1e-6)
    return torch.lerp(y[left], y[left + 1], share.clamp(0, 1))


def mel_steps(audio: Tensor) -> Tensor:
    """Map int16 samples [B, 6400] to float32 [B, 40, 24], mean 0 and deviation 1 over each clip."""
    samples = torch.nn.functional.pad(audio.to(torch.float32), (_WINDOW - _HOP, 0)) / 32768.0
    power: Tensor = torch.fft.rfft(samples.unfold(1, _WINDOW, _HOP) * _window()).abs().square()
    bands: Tensor = (power @ _triangles()).clamp(min=1e-8).log()
    centred = bands - bands.mean(dim=(1, 2), keepdim=True)
    deviation: Tensor = centred.square().mean(dim=(1, 2), keepdim=True).sqrt()
    return centred / (deviation + 1e-3)


@cache
def _window() -> Tensor:
    return torch.hann_window(_WINDOW, periodic=True)


@cache
def _triangles() -> Tensor:
    """Filters of equal width in mel from the lowest to the Nyquist frequency, [_WINDOW / 2 + 1, BANDS]."""
    lowest, highest = _mel(torch.tensor(_LOWEST_HZ)), _mel(torch.tensor(_RATE_HZ / 2))
    edges = torch.linspace(float(lowest), float(highest), BANDS + 2, dtype=torch.float64)
    bins = _mel(torch.arange(_WINDOW // 2 + 1, dtype=torch.float64) * _RATE_HZ / _WINDOW)[:, None]
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return torch.minimum(rising, falling).clamp(min=0).to(torch.float32)


def _mel(hertz: Tensor) -> Tensor:
    return 1127.0 * torch.log1p(hertz.to(torch.float64) / 700.0)


class MultimodalNetwork(nn.Module, ABC):
    """Classifies a digit from any of audio, video and text."""

    def __init__(self) -> None:
        super().__init__()
        self.temperatures: Tensor
        self.knots: Tensor
        subsets = 2 ** len(MODALITIES)
        self.register_buffer("temperatures", torch.ones(subsets))
        self.register_buffer("knots", torch.from_numpy(identity_calibration()).repeat(subsets, 1, 1))

    @abstractmethod
    def logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Score the ten digits, float32 [B, 10].

        Inputs are at least one of `audio` int16 [B, 6400], `video` uint8 [B, 4, 24, 24] and `text` uint8 [B, 6].
        """

    def infer(self, inputs: Mapping[str, Tensor], point: OperatingPoint | None = None) -> dict[str, Tensor]:
        """Map the modalities that point and batch have to `digit` and calibrated `confidence`; ValueError if none."""
        if point is not None and point.modalities:
            inputs = {name: tensor for name, tensor in inputs.items() if name in point.modalities}
        subset = subset_bits(inputs)
        scores = self.logits(inputs) / self.temperatures[subset]
        probability, digit = scores.softmax(dim=1).max(dim=1)
        return {"digit": digit, "confidence": apply_calibration(self.knots[subset], probability)}

    @torch.no_grad()
    def calibrate(self, subset: tuple[str, ...], calibration: Calibration) -> None:
        self.temperatures[subset_bits(subset)] = calibration.temperature
        self.knots[subset_bits(subset)] = torch.from_numpy(calibration.knots)

    def calibration(self, subset: tuple[str, ...]) -> Calibration:
        bits = subset_bits(subset)
        return Calibration(float(self.temperatures[bits]), self.knots[bits].numpy())


def subset_bits(names: Mapping[str, Tensor] | tuple[str, ...]) -> int:
    """The number of a subset: bit 0 for audio, 1 for video, 2 for text; ValueError if it is empty."""
    bits = sum(1 << index for index, name in enumerate(MODALITIES) if name in names)
    if not bits:
        raise ValueError(f"no input; give at least one of {', '.join(MODALITIES)}")
    return bits


def characters(text: Tensor) -> Tensor:
    """Map ASCII bytes [B, 6] to codes below 32, int64."""
    return (text & (CHARACTER_CODES - 1)).to(torch.int64)


def pixels(video: Tensor) -> Tensor:
    """Map bytes [B, 4, 24, 24] to float32 around 0."""
    return video.to(torch.float32).sub_(100.0).mul_(1 / 64)


def select_modalities(inputs: Mapping[str, Tensor], subset: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: inputs[name] for name in subset}


def strict_pairs() -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """All (smaller, larger) subsets, the smaller inside the larger."""
    return [(fewer, more) for fewer in SUBSETS for more in SUBSETS if set(fewer) < set(more)]
