"""AV-HuBERT (Shi et al., ICLR 2022): concatenated features of lips and audio, then one transformer over the frames.

Inputs are `video` UINT8 [B, T, 88, 88], the mouth at 25 frames a second, and `audio` FP32 [B, T, 104], four filterbank
frames for each of them; outputs are `tokens` INT64 [B, max_new_tokens] and `confidence`. Features are concatenated by
channels: for an absent modality they are zero, as in training with modality dropout, and only its front end is skipped.
"""

from collections.abc import Mapping
from functools import partial

import torch
from pydantic import Field
from torch import Tensor, nn
from torchvision import models

from trimtab_model_servers.families.interfaces import Built, Parameters
from trimtab_model_servers.families.multimodal import Encoder, MultimodalModel, build_multimodal
from trimtab_model_servers.families.sequences import collapse_repeats, resize_width
from trimtab_pipelines.model_spec import ModelSpec

KNOBS = frozenset({"modalities"})
MODALITIES = ("video", "audio")
BANDS = 104
LIPS = 512
SIZES = {"base": (12, 768, 12), "large": (24, 1024, 16)}
"""Layers, width and heads (table A.1 of the paper)."""
POSITION_KERNEL, POSITION_GROUPS = 128, 16


class AvHubertParameters(Parameters):
    """Settings of the family."""

    pieces: int = Field(default=1000, ge=2, le=100_000, description="Vocabulary of word pieces; the first is blank")
    max_new_tokens: int = Field(default=64, ge=1, le=1000, description="Maximum tokens generated")
    layers: int | None = Field(default=None, ge=1, le=48, description="Layers of the transformer; default by size")


class Lips(nn.Module):
    """A 3D convolution, ResNet-18 on each frame, and a projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.moving = nn.Sequential(
            nn.Conv3d(1, 64, (5, 7, 7), (1, 2, 2), (2, 3, 3), bias=False),
            nn.BatchNorm3d(64),
            nn.PReLU(64),
            nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1)),
        )
        resnet = models.resnet18(weights=None)
        self.still = nn.Sequential(resnet.layer1, resnet.layer2, resnet.layer3, resnet.layer4)
        self.last = nn.Linear(LIPS, width)

    def forward(self, video: Tensor) -> Tensor:
        """Map UINT8 [B, T, 88, 88] to [B, T, width]."""
        rows, frames = video.shape[:2]
        moved = self.moving(video[:, None].to(torch.float32).sub_(107.0).mul_(1 / 42.0))
        frames_features = self.still(moved.transpose(1, 2).flatten(0, 1)).mean(dim=(2, 3))
        features: Tensor = self.last(frames_features).view(rows, frames, -1)
        return features


class AvHubert(MultimodalModel):
    """Two front ends and the transformer."""

    modalities = MODALITIES

    def __init__(self, size: str, parameters: AvHubertParameters) -> None:
        super().__init__()
        layers, width, heads = SIZES[size]
        self.max_new_tokens = parameters.max_new_tokens
        self.lips = Lips(width)
        self.sound = nn.Linear(BANDS, width)
        self.joined = nn.LayerNorm(2 * width)
        self.project = nn.Linear(2 * width, width)
        self.position = nn.Conv1d(width, width, POSITION_KERNEL, padding=POSITION_KERNEL // 2, groups=POSITION_GROUPS)
        self.trunk = Encoder(parameters.layers or layers, width, heads, 4 * width)
        self.head = nn.Linear(width, parameters.pieces)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Score the word pieces of each frame from one or both modalities: [B, T, pieces]."""
        front = {"video": self.lips, "audio": self.sound}
        features = {name: front[name](tensor) for name, tensor in inputs.items()}
        like = next(iter(features.values()))
        joined = torch.cat([features.get(name, like.new_zeros(like.shape)) for name in ("audio", "video")], dim=2)
        x = self.project(self.joined(joined))
        positioned = self.position(x.transpose(1, 2))[:, :, : x.shape[1]].transpose(1, 2)
        scores: Tensor = self.head(self.trunk(x + nn.functional.gelu(positioned)))
        return scores

    def outputs(self, result: Tensor) -> dict[str, Tensor]:
        """Map scores of word pieces to `tokens` [B, max_new_tokens] and `confidence` [B], the mean over frames."""
        likely, pieces = result.softmax(dim=2).max(dim=2)
        tokens = resize_width(collapse_repeats(pieces, 0), self.max_new_tokens)
        return {"tokens": tokens, "confidence": likely.mean(dim=1)}


def build(spec: ModelSpec) -> Built:
    return build_multimodal(partial(AvHubert, spec.family.rpartition("-")[2]), AvHubertParameters, spec)
