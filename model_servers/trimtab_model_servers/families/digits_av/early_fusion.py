"""Early fusion (TVLT, Tang et al. 2022; ViLT, Kim et al. 2021): one trunk encodes the tokens of all given modalities.

Convolutions make a token of each 80 ms of audio and of each 8 x 8 pixels of a frame: audio and text have 17 tokens, all
modalities 53. Frames pass three convolutions, because a trunk this small learns no strokes from patches (Xiao et al.
2021): with two, video accuracy was 0.17.
"""

from collections.abc import Mapping

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from trimtab_model_servers.families.digits_av import CHARACTERS, CLASSES, FRAMES, MODALITIES, SIDE_PX, base
from trimtab_model_servers.families.digits_av.base import MultimodalNetwork
from trimtab_model_servers.families.multimodal import Encoder

REACH_STEPS = 4
"""Audio steps of one token."""
REACH_PX = 8
"""Side of the square of pixels of one token."""


class EarlyConfig(BaseModel):
    """Sizes of an early-fusion network."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int = Field(default=64, ge=8, description="of every token")
    depth: int = Field(default=3, ge=1, description="blocks")
    heads: int = Field(default=4, ge=1)
    stem: int = Field(default=24, ge=1, description="channels of the convolutions before the tokens")


class EarlyNetwork(MultimodalNetwork):
    """One trunk for all modalities."""

    def __init__(self, config: EarlyConfig) -> None:
        super().__init__()
        self.config = config
        width, across = config.width, SIDE_PX // REACH_PX
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.kinds = nn.Parameter(torch.randn(len(MODALITIES), 1, 1, width) * 0.02)
        self.sound = nn.Sequential(
            nn.Conv1d(base.BANDS, 2 * config.stem, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv1d(2 * config.stem, width, 3, stride=2, padding=1),
        )
        self.moments = nn.Parameter(torch.randn(1, base.STEPS // REACH_STEPS, width) * 0.02)
        self.patch = nn.Sequential(
            nn.Conv2d(1, config.stem, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(config.stem, 2 * config.stem, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(2 * config.stem, width, 3, stride=2, padding=1),
        )
        self.frames = nn.Parameter(torch.randn(1, FRAMES, 1, width) * 0.02)
        self.places = nn.Parameter(torch.randn(1, 1, across**2, width) * 0.02)
        self.letters = nn.Embedding(base.CHARACTER_CODES, width)
        self.positions = nn.Parameter(torch.randn(1, CHARACTERS, width) * 0.02)
        self.trunk = Encoder(config.depth, width, config.heads, 4 * width)
        self.classes = nn.Linear(width, CLASSES)

    def logits(self, inputs: Mapping[str, Tensor]) -> Tensor:
        embed = {"audio": self._audio_tokens, "video": self._video_tokens, "text": self._text_tokens}
        present = base.subset_bits(inputs)
        tokens = [embed[name](inputs[name]) + self.kinds[n] for n, name in enumerate(MODALITIES) if present & (1 << n)]
        first = self.first.expand(len(tokens[0]), -1, -1)
        scores: Tensor = self.classes(self.trunk(torch.cat([first, *tokens], dim=1))[:, 0])
        return scores

    def _audio_tokens(self, audio: Tensor) -> Tensor:
        tokens: Tensor = self.sound(base.mel_steps(audio).transpose(1, 2)).transpose(1, 2)
        return tokens + self.moments

    def _video_tokens(self, video: Tensor) -> Tensor:
        rows, frames = video.shape[:2]
        patches = self.patch(base.pixels(video).flatten(0, 1)[:, None]).flatten(2).transpose(1, 2)
        placed: Tensor = patches.reshape(rows, frames, -1, self.config.width) + self.frames + self.places
        return placed.flatten(1, 2)

    def _text_tokens(self, text: Tensor) -> Tensor:
        letters: Tensor = self.letters(base.characters(text))
        return letters + self.positions
