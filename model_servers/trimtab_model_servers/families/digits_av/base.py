"""What both networks share: which senses a batch brings, how certain an answer is, and their common interface.

An absent modality is not zeroed: nothing is computed for it. Each of the seven subsets has a calibration of its own,
fitted after training, since a network is not equally sure of itself with one sense as with three.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from trimtab_model_servers.families.digits_av import MODALITIES, SUBSETS
from trimtab_model_servers.families.digits_av.calibration import Calibration, apply_calibration, identity_calibration

CHARACTER_CODES: Final = 32
"""The last five bits of an ASCII letter number it from 1; what is not typed is 0."""


class MultimodalNetwork(nn.Module, ABC):
    """Names the digit from any of audio, video and text; see `logits`."""

    def __init__(self) -> None:
        super().__init__()
        self.temperatures: Tensor
        self.knots: Tensor
        every = 2 ** len(MODALITIES)
        self.register_buffer("temperatures", torch.ones(every))
        self.register_buffer("knots", torch.from_numpy(identity_calibration()).repeat(every, 1, 1))

    @abstractmethod
    def logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Score the ten digits from what is given, at least one sense.

        Args:
            inputs: of `audio` int16 [B, 6400], `video` uint8 [B, 4, 24, 24], `text` uint8 [B, 6] those that are there.

        Returns:
            float32 [B, 10].
        """

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Map what is given to `digit` int64 [B] and `confidence` float32 [B], the calibrated probability of it."""
        subset = subset_bits(inputs)
        scores = self.logits(inputs) / self.temperatures[subset]
        probability, digit = scores.softmax(dim=1).max(dim=1)
        return {"digit": digit, "confidence": apply_calibration(self.knots[subset], probability)}

    @torch.no_grad()
    def calibrate(self, subset: tuple[str, ...], by: Calibration) -> None:
        """Say how certain answers from this subset are by this from now on."""
        self.temperatures[subset_bits(subset)] = by.temperature
        self.knots[subset_bits(subset)] = torch.from_numpy(by.knots)

    def calibration(self, subset: tuple[str, ...]) -> Calibration:
        """What is in force for a subset."""
        bits = subset_bits(subset)
        return Calibration(float(self.temperatures[bits]), self.knots[bits].numpy())


def subset_bits(names: Mapping[str, Tensor] | tuple[str, ...]) -> int:
    """The number of a subset: bit 0 for audio, 1 for video, 2 for text.

    Raises:
        ValueError: none of the three is there.
    """
    bits = sum(1 << place for place, name in enumerate(MODALITIES) if name in names)
    if not bits:
        raise ValueError(f"there is nothing to answer from: give at least one of {', '.join(MODALITIES)}")
    return bits


def characters(text: Tensor) -> Tensor:
    """Map ASCII bytes [B, 6] to codes below 32, int64."""
    return (text & (CHARACTER_CODES - 1)).to(torch.int64)


def pixels(video: Tensor) -> Tensor:
    """Map bytes [B, 4, 24, 24] to float32 around 0."""
    return video.to(torch.float32).sub_(100.0).mul_(1 / 64)


def parts(inputs: Mapping[str, Tensor], subset: tuple[str, ...]) -> dict[str, Tensor]:
    """Keep the modalities of a subset."""
    return {name: inputs[name] for name in subset}


def strict_pairs() -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """All (smaller, larger) with the smaller subset inside the larger one."""
    return [(one, other) for one in SUBSETS for other in SUBSETS if set(one) < set(other)]
