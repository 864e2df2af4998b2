"""Base of the digits-av networks: modality subsets, calibrated confidence and the common interface.

Nothing is computed for an absent modality. Each of the seven subsets has its own calibration, fitted after training.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from trimtab_model_servers.families.digits_av import MODALITIES, SUBSETS
from trimtab_model_servers.families.digits_av.calibration import Calibration, apply_calibration, identity_calibration

CHARACTER_CODES: Final = 32
"""The last five bits of an ASCII letter number it from 1; padding is 0."""


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

        Args:
            inputs: at least one of `audio` int16 [B, 6400], `video` uint8 [B, 4, 24, 24], `text` uint8 [B, 6].
        """

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Map inputs to `digit` int64 [B] and `confidence` float32 [B], its calibrated probability."""
        subset = subset_bits(inputs)
        scores = self.logits(inputs) / self.temperatures[subset]
        probability, digit = scores.softmax(dim=1).max(dim=1)
        return {"digit": digit, "confidence": apply_calibration(self.knots[subset], probability)}

    @torch.no_grad()
    def calibrate(self, subset: tuple[str, ...], calibration: Calibration) -> None:
        """Replace the calibration of a subset."""
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
