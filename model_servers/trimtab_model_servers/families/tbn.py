"""TBN (Kazakos et al., ICCV 2019): a BN-Inception each for RGB, optical flow and audio, fused per segment.

Inputs are `image` UINT8 [B, 3, 3, 224, 224], a frame per segment, `flow` UINT8 [B, 3, 10, 224, 224], five steps of
horizontal and vertical flow, and `audio` FP32 [B, 3, 1, 256, 256], log spectrograms; outputs are `label` (verb), `noun`
and the verb's `confidence`. Late fusion: for an absent modality, the encoder and its columns of the fusion layer are
skipped, which equals features of zero; the weights must be trained with modality dropout.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from pydantic import Field
from torch import Tensor, nn

from trimtab_model_servers.families.interfaces import Parameters
from trimtab_model_servers.families.multimodal import MultimodalModel, build_multimodal, classify

FEATURES = 1024
CHANNELS = {"image": 3, "flow": 10, "audio": 1}
KNOBS = frozenset({"modalities"})
MODALITIES = tuple(CHANNELS)
FUSED = 512


@dataclass(frozen=True, slots=True)
class Block:
    """Channels of an inception block's four branches."""

    one: int
    """Of the 1 × 1 convolution; 0 for no such branch."""
    three: tuple[int, int]
    """Of the 1 × 1 and the 3 × 3 convolution."""
    double: tuple[int, int]
    """Of the 1 × 1 and of each of the two 3 × 3 convolutions."""
    pool: int
    """Of the 1 × 1 convolution after pooling; 0 for no convolution."""
    max_pool: bool = False
    """Maximum instead of mean pooling."""
    stride: int = 1
    """2 halves the resolution."""


BLOCKS = (
    Block(64, (64, 64), (64, 96), 32),
    Block(64, (64, 96), (64, 96), 64),
    Block(0, (128, 160), (64, 96), 0, max_pool=True, stride=2),
    Block(224, (64, 96), (96, 128), 128),
    Block(192, (96, 128), (96, 128), 128),
    Block(160, (128, 160), (128, 160), 128),
    Block(96, (128, 192), (160, 192), 128),
    Block(0, (128, 192), (192, 256), 0, max_pool=True, stride=2),
    Block(352, (192, 320), (160, 224), 128),
    Block(352, (192, 320), (192, 224), 128, max_pool=True),
)


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class Inception(nn.Module):
    """Up to four parallel branches, concatenated by channels."""

    def __init__(self, inputs: int, block: Block) -> None:
        super().__init__()
        middle, three = block.three
        inner, double = block.double
        branches = [] if not block.one else [convolution(inputs, block.one, 1)]
        branches.append(nn.Sequential(convolution(inputs, middle, 1), convolution(middle, three, 3, block.stride)))
        deep = (
            convolution(inputs, inner, 1),
            convolution(inner, double, 3),
            convolution(double, double, 3, block.stride),
        )
        branches.append(nn.Sequential(*deep))
        pooled: nn.Module = (
            nn.MaxPool2d(3, block.stride, padding=1) if block.max_pool else nn.AvgPool2d(3, block.stride, padding=1)
        )
        projection = [convolution(inputs, block.pool, 1)] if block.pool else []
        branches.append(nn.Sequential(pooled, *projection))
        self.ways = nn.ModuleList(branches)
        self.outputs = block.one + three + double + (block.pool or inputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, H / stride, W / stride]."""
        return torch.cat([branch(x) for branch in self.ways], dim=1)


class BnInception(nn.Module):
    """The network up to its features."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            convolution(channels, 64, 7, 2),
            nn.MaxPool2d(3, 2, padding=1),
            convolution(64, 64, 1),
            convolution(64, 192, 3),
            nn.MaxPool2d(3, 2, padding=1),
        )
        blocks, channels = [], 192
        for block in BLOCKS:
            blocks.append(Inception(channels, block))
            channels = blocks[-1].outputs
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, channels, H, W] to features [B, 1024], averaged over positions."""
        features: Tensor = self.blocks(self.stem(x)).mean(dim=(2, 3))
        return features


class TbnParameters(Parameters):
    """Settings of the family; the defaults are those of the paper, for EPIC-Kitchens."""

    verbs: int = Field(default=125, ge=2, le=10_000)
    nouns: int = Field(default=352, ge=2, le=10_000)


class Tbn(MultimodalModel):
    """Three encoders, a fusion layer, and two heads."""

    modalities = MODALITIES

    def __init__(self, size: TbnParameters) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict({name: BnInception(channels) for name, channels in CHANNELS.items()})
        self.fusion = nn.Linear(len(CHANNELS) * FEATURES, FUSED)
        self.verb = nn.Linear(FUSED, size.verbs)
        self.noun = nn.Linear(FUSED, size.nouns)

    def forward(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Score verbs and nouns from the given modalities, [B, verbs] and [B, nouns], averaged over segments."""
        return self.fuse({name: self.encode(name, tensor) for name, tensor in inputs.items()})

    def encode(self, name: str, tensor: Tensor) -> Tensor:
        """Map segments [B, S, channels, H, W] of a modality to features [B, S, 1024]."""
        rows, segments = tensor.shape[:2]
        images = tensor.flatten(0, 1).to(torch.float32)
        if tensor.dtype == torch.uint8:
            images = images.sub_(110.0)
        features: Tensor = self.encoders[name](images)
        return features.view(rows, segments, FEATURES)

    def fuse(self, features: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Score features [B, S, 1024] of the given modalities."""
        present = [n for n, name in enumerate(MODALITIES) if name in features]
        columns = self.fusion.weight.view(FUSED, len(MODALITIES), FEATURES)[:, present].flatten(1)
        joined = torch.cat([features[MODALITIES[n]] for n in present], dim=2)
        fused = torch.relu(nn.functional.linear(joined, columns, self.fusion.bias))
        return self.verb(fused).mean(dim=1), self.noun(fused).mean(dim=1)

    def outputs(self, result: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Map scores of verbs and nouns to `label` [B], `confidence` [B] and `noun` [B]."""
        verbs, nouns = result
        return classify(verbs) | {"noun": nouns.argmax(dim=1)}


build = partial(build_multimodal, Tbn, TbnParameters)
