"""Late fusion, in the manner of TBN and Self-MM: an encoder for each sense, a head for each, and one that joins them.

Scores of the senses' own heads are added up, and a small network that sees the sum of their features and which senses
there are corrects the sum. So a single sense needs no fusion, and every subset has its own way through (Self-MM, Yu et
al. 2021; TBN, Kazakos et al. 2019). Features that `encode` gave once can be fused again beside those of another sense.
"""

from collections.abc import Mapping
from typing import Final

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from trimtab_model_servers.families.digits_av import CHARACTERS, CLASSES, FRAMES, MODALITIES, SIDE_PX
from trimtab_model_servers.families.digits_av.base import (
    CHARACTER_CODES,
    MultimodalNetwork,
    characters,
    pixels,
    subset_bits,
)
from trimtab_model_servers.families.digits_av.mel_features import BANDS, mel_steps

ROWS_AT_ONCE: Final = 16
"""Through the convolutions over frames: what lies between the layers then stays in a core's cache; 64 rows at once take
twice as long."""


class LateConfig(BaseModel):
    """What makes one late-fusion network differ from the next."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int = Field(default=64, ge=8, description="of each sense's features")
    seen: tuple[int, int, int] = Field(default=(24, 48, 64), description="channels of the convolutions over a frame")


class AudioEncoder(nn.Module):
    """Three convolutions over time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(BANDS, 48, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv1d(48, 64, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv1d(64, 64, 3, padding=1),
            nn.GELU(),
        )
        self.last = nn.Linear(640, width)

    def forward(self, audio: Tensor) -> Tensor:
        """int16 [B, 6400] to [B, width]."""
        features: Tensor = self.last(self.layers(mel_steps(audio).transpose(1, 2)).flatten(1))
        return features


class VideoEncoder(nn.Module):
    """Convolutions over each frame, the mean over frames."""

    def __init__(self, channels: tuple[int, int, int], width: int) -> None:
        super().__init__()
        one, two, three = channels
        self.layers = nn.Sequential(
            nn.Conv2d(1, one, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(one, two, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(two, two, 3, padding=1),
            nn.GELU(),
            nn.Conv2d(two, three, 3, stride=2, padding=1),
            nn.GELU(),
        )
        self.last = nn.Linear(three * (SIDE_PX // 4) ** 2, width)

    def forward(self, video: Tensor) -> Tensor:
        """uint8 [B, 4, 24, 24] to [B, width]."""
        return torch.cat([self._seen(video[at : at + ROWS_AT_ONCE]) for at in range(0, len(video), ROWS_AT_ONCE)])

    def _seen(self, video: Tensor) -> Tensor:
        frames = self.layers(pixels(video).flatten(0, 1)[:, None])
        features: Tensor = self.last(frames.flatten(1)).view(len(video), FRAMES, -1).mean(dim=1)
        return features


class TextEncoder(nn.Module):
    """One layer over the letters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(CHARACTER_CODES, 16)
        self.layers = nn.Sequential(nn.Linear(CHARACTERS * 16, 96), nn.GELU(), nn.Linear(96, width))

    def forward(self, text: Tensor) -> Tensor:
        """uint8 [B, 6] to [B, width]."""
        features: Tensor = self.layers(self.letters(characters(text)).flatten(1))
        return features


class LateNetwork(MultimodalNetwork):
    """An encoder for each sense, joined at the end."""

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
        """Score the digits; see `MultimodalNetwork.logits`."""
        return self.fuse({name: self.encode(name, inputs[name]) for name in MODALITIES if name in inputs})

    def encode(self, name: str, given: Tensor) -> Tensor:
        """Compute the features of one sense, [B, width]."""
        features: Tensor = self.encoders[name](given)
        return features

    def fuse(self, features: Mapping[str, Tensor]) -> Tensor:
        """Score the digits from the features of some senses: [B, width] each to [B, 10]."""
        bits = subset_bits(dict(features))
        names = [name for name in MODALITIES if name in features]
        scores = torch.stack([self.heads[name](features[name]) for name in names]).sum(dim=0)
        if len(names) == 1:
            return scores
        joined = torch.stack([self.joined[name](features[name]) for name in names]).sum(dim=0)
        corrected: Tensor = scores + self.corrects(joined + self.which.weight[bits])
        return corrected
