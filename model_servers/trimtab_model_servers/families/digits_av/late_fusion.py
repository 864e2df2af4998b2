"""Late fusion (TBN, Kazakos et al. 2019; Self-MM, Yu et al. 2021): an encoder and a head for each modality.

The heads' scores are summed, and a small network corrects the sum from the summed features and the modality subset. A
single modality needs no fusion. Encoded features can be fused again with those of another modality.
"""

from collections.abc import Mapping
from typing import Final

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from trimtab_model_servers.families.digits_av import CHARACTERS, CLASSES, FRAMES, MODALITIES, SIDE_PX, base
from trimtab_model_servers.families.digits_av.base import MultimodalNetwork

ROWS_AT_ONCE: Final = 16
"""Rows per pass of the frame convolutions: activations then fit a core's cache; 64 rows take twice as long."""


class LateConfig(BaseModel):
    """Sizes of a late-fusion network."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int = Field(default=64, ge=8, description="of each modality's features")
    seen: tuple[int, int, int] = Field(default=(24, 48, 64), description="channels of the convolutions over a frame")


class AudioEncoder(nn.Module):
    """Three convolutions over time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(base.BANDS, 48, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv1d(48, 64, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv1d(64, 64, 3, padding=1),
            nn.GELU(),
        )
        self.last = nn.Linear(640, width)

    def forward(self, audio: Tensor) -> Tensor:
        """int16 [B, 6400] to [B, width]."""
        features: Tensor = self.last(self.layers(base.mel_steps(audio).transpose(1, 2)).flatten(1))
        return features


class VideoEncoder(nn.Module):
    """Convolutions over each frame, the mean over frames."""

    def __init__(self, channels: tuple[int, int, int], width: int) -> None:
        super().__init__()
        first, second, third = channels
        self.layers = nn.Sequential(
            nn.Conv2d(1, first, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(first, second, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(second, second, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(second, third, 3, stride=2, padding=1),
            nn.GELU(),
        )
        self.last = nn.Linear(third * (SIDE_PX // 4) ** 2, width)

    def forward(self, video: Tensor) -> Tensor:
        """uint8 [B, 4, 24, 24] to [B, width]."""
        return torch.cat([self._encode(rows) for rows in torch.split(video, ROWS_AT_ONCE)])

    def _encode(self, video: Tensor) -> Tensor:
        frames = self.layers(base.pixels(video).flatten(0, 1)[:, None])
        features: Tensor = self.last(frames.flatten(1)).view(len(video), FRAMES, -1).mean(dim=1)
        return features


class TextEncoder(nn.Module):
    """One layer over the letters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(base.CHARACTER_CODES, 16)
        self.layers = nn.Sequential(nn.Linear(CHARACTERS * 16, 96), nn.GELU(), nn.Linear(96, width))

    def forward(self, text: Tensor) -> Tensor:
        """uint8 [B, 6] to [B, width]."""
        features: Tensor = self.layers(self.letters(base.characters(text)).flatten(1))
        return features


class LateNetwork(MultimodalNetwork):
    """An encoder for each modality, fused at the end."""

    def __init__(self, config: LateConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.encoders = nn.ModuleDict(
            {"audio": AudioEncoder(width), "video": VideoEncoder(config.seen, width), "text": TextEncoder(width)}
        )
        self.heads = nn.ModuleDict({name: nn.Sequential(nn.GELU(), nn.Linear(width, CLASSES)) for name in MODALITIES})
        self.joined = nn.ModuleDict({name: nn.Linear(width, width) for name in MODALITIES})
        self.which = nn.Embedding(2 ** len(MODALITIES), width)
        self.corrects = nn.Sequential(nn.GELU(), nn.Linear(width, CLASSES))

    def logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.fuse({name: self.encode(name, inputs[name]) for name in MODALITIES if name in inputs})

    def encode(self, name: str, tensor: Tensor) -> Tensor:
        """Features of one modality, [B, width]."""
        features: Tensor = self.encoders[name](tensor)
        return features

    def fuse(self, features: Mapping[str, Tensor]) -> Tensor:
        """Score the digits from the features [B, width] of some modalities: [B, 10]."""
        bits = base.subset_bits(dict(features))
        names = [name for name in MODALITIES if name in features]
        scores = torch.stack([self.heads[name](features[name]) for name in names]).sum(dim=0)
        if len(names) == 1:
            return scores
        joined = torch.stack([self.joined[name](features[name]) for name in names]).sum(dim=0)
        corrected: Tensor = scores + self.corrects(joined + self.which.weight[bits])
        return corrected
