"""BN-Inception (Ioffe and Szegedy, ICML 2015, appendix), the encoder of TBN for each modality."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

FEATURES = 1024


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
    """Convolution, batch norm, ReLU."""
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
