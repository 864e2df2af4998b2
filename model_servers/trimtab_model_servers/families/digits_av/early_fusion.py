"""Early fusion, in the manner of TVLT and ViLT: one trunk reads the tokens of all senses; what is absent has no tokens.

Convolutions make a token of each 80 ms of sound and of each 8 x 8 pixels of a frame: a batch of sound and text is 17
tokens long, one of everything 53 (TVLT, Tang et al. 2022; ViLT, Kim et al. 2021). Three convolutions before the tokens
of a frame, since a trunk this small learns no strokes from patches alone (Xiao et al. 2021): with two, and four times
the tokens, it named 17 of 100 digits by sight.
"""

from collections.abc import Mapping

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
from trimtab_model_servers.families.digits_av.mel_features import BANDS, STEPS, mel_steps
from trimtab_model_servers.transformer_encoder import Encoder

REACH_STEPS = 4
"""Steps of sound that become one token."""
REACH_PX = 8
"""Pixels across and down that become one token."""


class EarlyConfig(BaseModel):
    """What makes one early-fusion network differ from the next."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int = Field(default=64, ge=8, description="of every token")
    depth: int = Field(default=3, ge=1, description="blocks")
    heads: int = Field(default=4, ge=1)
    stem: int = Field(default=24, ge=1, description="channels of the convolutions before the tokens")


class EarlyNetwork(MultimodalNetwork):
    """One trunk for all senses."""

    def __init__(self, config: EarlyConfig) -> None:
        super().__init__()
        self.config = config
        width, across = config.width, SIDE_PX // REACH_PX
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.kinds = nn.Parameter(torch.randn(len(MODALITIES), 1, 1, width) * 0.02)
        self.sound = nn.Sequential(
            nn.Conv1d(BANDS, 2 * config.stem, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv1d(2 * config.stem, width, 3, stride=2, padding=1),
        )
        self.moments = nn.Parameter(torch.randn(1, STEPS // REACH_STEPS, width) * 0.02)
        self.patch = nn.Sequential(
            nn.Conv2d(1, config.stem, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(config.stem, 2 * config.stem, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(2 * config.stem, width, 3, stride=2, padding=1),
        )
        self.frames = nn.Parameter(torch.randn(1, FRAMES, 1, width) * 0.02)
        self.places = nn.Parameter(torch.randn(1, 1, across**2, width) * 0.02)
        self.letters = nn.Embedding(CHARACTER_CODES, width)
        self.positions = nn.Parameter(torch.randn(1, CHARACTERS, width) * 0.02)
        self.trunk = Encoder(config.depth, width, config.heads, 4 * width)
        self.classes = nn.Linear(width, CLASSES)

    def logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Score the digits; see `MultimodalNetwork.logits`."""
        readers = {"audio": self._heard, "video": self._seen, "text": self._read}
        present = subset_bits(inputs)
        given = [readers[name](inputs[name]) + self.kinds[n] for n, name in enumerate(MODALITIES) if present & (1 << n)]
        first = self.first.expand(len(given[0]), -1, -1)
        scores: Tensor = self.classes(self.trunk(torch.cat([first, *given], dim=1))[:, 0])
        return scores

    def _heard(self, audio: Tensor) -> Tensor:
        tokens: Tensor = self.sound(mel_steps(audio).transpose(1, 2)).transpose(1, 2)
        return tokens + self.moments

    def _seen(self, video: Tensor) -> Tensor:
        rows, frames = video.shape[:2]
        cut = self.patch(pixels(video).flatten(0, 1)[:, None]).flatten(2).transpose(1, 2)
        placed: Tensor = cut.reshape(rows, frames, -1, self.config.width) + self.frames + self.places
        return placed.flatten(1, 2)

    def _read(self, text: Tensor) -> Tensor:
        letters: Tensor = self.letters(characters(text))
        return letters + self.positions
