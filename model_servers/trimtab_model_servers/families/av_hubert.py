"""AV-HuBERT (Shi et al., ICLR 2022): features of lips and of sound side by side, then one transformer over the frames.

`video` UINT8 [B, T, 88, 88], the mouth at 25 frames a second; `audio` FP32 [B, T, 104], four filterbank frames for each
of them; to `tokens` INT64 [B, max_new_tokens] and `confidence`. The two are joined along channels, so that the trunk is
as long with one as with both: of what is absent only the front end is saved, its features are zeros, as in training
with modalities dropped.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor, nn
from torchvision import models

from trimtab_model_servers.families.interfaces import Built
from trimtab_model_servers.families.modality_inputs import built_from, select_inputs
from trimtab_model_servers.families.parameters import Parameters, read_parameters
from trimtab_model_servers.families.sequences import widened
from trimtab_model_servers.families.speech_recognition import collapsed
from trimtab_model_servers.transformer_encoder import Encoder
from trimtab_model_servers.weights import with_weights
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.operating_point import OperatingPoint

KNOBS = frozenset({"modalities"})
MODALITIES = ("video", "audio")
BANDS = 104
LIPS = 512
SIZES = {"base": (12, 768, 12), "large": (24, 1024, 16)}
"""Layers, width and heads (table A.1 of the paper)."""
POSITION_KERNEL, POSITION_GROUPS = 128, 16


class AvHubertParameters(Parameters):
    """Settings of the family."""

    pieces: int = Field(default=1000, ge=2, le=100_000, description="Pieces of words it may name; the first is blank")
    max_new_tokens: int = Field(default=64, ge=1, le=1000, description="Tokens written at most")
    layers: int | None = Field(default=None, ge=1, le=48, description="Of the trunk; else the size's own")


class Lips(nn.Module):
    """A convolution over time and place, ResNet-18 on each frame, and a projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.moving = nn.Sequential(
            nn.Conv3d(1, 64, (5, 7, 7), (1, 2, 2), (2, 3, 3), bias=False),
            nn.BatchNorm3d(64),
            nn.PReLU(64),
            nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1)),
        )
        whole = models.resnet18(weights=None)
        self.still = nn.Sequential(whole.layer1, whole.layer2, whole.layer3, whole.layer4)
        self.last = nn.Linear(LIPS, width)

    def forward(self, video: Tensor) -> Tensor:
        """UINT8 [B, T, 88, 88] to [B, T, width]."""
        rows, frames = video.shape[:2]
        moved = self.moving(video[:, None].to(torch.float32).sub_(107.0).mul_(1 / 42.0))
        seen = self.still(moved.transpose(1, 2).flatten(0, 1)).mean(dim=(2, 3))
        features: Tensor = self.last(seen).view(rows, frames, -1)
        return features


class AvHubert(nn.Module):
    """Two front ends, their join, and the trunk."""

    def __init__(self, size: str, parameters: AvHubertParameters) -> None:
        super().__init__()
        layers, width, heads = SIZES[size]
        self.width = width
        self.lips = Lips(width)
        self.sound = nn.Linear(BANDS, width)
        self.joined = nn.LayerNorm(2 * width)
        self.project = nn.Linear(2 * width, width)
        self.position = nn.Conv1d(width, width, POSITION_KERNEL, padding=POSITION_KERNEL // 2, groups=POSITION_GROUPS)
        self.trunk = Encoder(parameters.layers or layers, width, heads, 4 * width)
        self.head = nn.Linear(width, parameters.pieces)

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Score the pieces of words frame by frame from one modality or both: [B, T, pieces]."""
        front = {"video": self.lips, "audio": self.sound}
        features = {name: front[name](tensor) for name, tensor in inputs.items()}
        one = next(iter(features.values()))
        joined = torch.cat([features.get(name, one.new_zeros(one.shape)) for name in ("audio", "video")], dim=2)
        x = self.project(self.joined(joined))
        placed = self.position(x.transpose(1, 2))[:, :, : x.shape[1]].transpose(1, 2)
        scores: Tensor = self.head(self.trunk(x + nn.functional.gelu(placed)))
        return scores


@dataclass(frozen=True, slots=True)
class AvHubertNetwork:
    """AV-HuBERT as a replica serves it, with a layer that names a piece a frame (CTC)."""

    network: AvHubert
    max_new_tokens: int

    def infer(self, inputs: dict[str, Tensor], point: OperatingPoint) -> dict[str, Tensor]:
        """Answer from the point's modalities: `tokens` [B, max_new_tokens], `confidence` [B], the mean over frames."""
        likely, pieces = self.network(select_inputs(inputs, point, MODALITIES)).softmax(dim=2).max(dim=2)
        tokens = widened(collapsed(pieces, 0), self.max_new_tokens)
        return {"tokens": tokens, "confidence": likely.mean(dim=1)}


def build(spec: ModelSpec) -> Built:
    """Build the size the family's name ends in, with stored or random weights."""
    parameters = read_parameters(AvHubertParameters, spec)
    size = spec.family.rpartition("-")[2]
    network, random = with_weights(spec, lambda: AvHubert(size, parameters))
    return built_from(AvHubertNetwork(network, parameters.max_new_tokens), random)
