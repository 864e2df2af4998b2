"""BN-Inception (Ioffe and Szegedy, ICML 2015, appendix): the encoder TBN has for each modality. Own code."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

FEATURES = 1024


@dataclass(frozen=True, slots=True)
class Block:
    """Channels of an inception block's four ways; a way of 0 is left out.

    Attributes:
        one: of the 1 × 1 convolution.
        three: of the 1 × 1 and the 3 × 3 convolution of the second way.
        double: of the 1 × 1 and of each of the two 3 × 3 convolutions of the third.
        pool: of the 1 × 1 convolution behind the pooling; 0: what is pooled passes as it is.
        largest: pool the largest instead of the mean.
        stride: 2 halves the resolution.
    """

    one: int
    three: tuple[int, int]
    double: tuple[int, int]
    pool: int
    largest: bool = False
    stride: int = 1


BLOCKS = (
    Block(64, (64, 64), (64, 96), 32),
    Block(64, (64, 96), (64, 96), 64),
    Block(0, (128, 160), (64, 96), 0, largest=True, stride=2),
    Block(224, (64, 96), (96, 128), 128),
    Block(192, (96, 128), (96, 128), 128),
    Block(160, (128, 160), (128, 160), 128),
    Block(96, (128, 192), (160, 192), 128),
    Block(0, (128, 192), (192, 256), 0, largest=True, stride=2),
    Block(352, (192, 320), (160, 224), 128),
    Block(352, (192, 320), (192, 224), 128, largest=True),
)


def convolution(read: int, gives: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Convolution, normalisation, ReLU."""
    return nn.Sequential(
        nn.Conv2d(read, gives, kernel, stride, padding=kernel // 2), nn.BatchNorm2d(gives), nn.ReLU(inplace=True)
    )


class Inception(nn.Module):
    """Up to four ways side by side, joined by channels."""

    def __init__(self, read: int, block: Block) -> None:
        super().__init__()
        middle, three = block.three
        inner, double = block.double
        ways = [] if not block.one else [convolution(read, block.one, 1)]
        ways.append(nn.Sequential(convolution(read, middle, 1), convolution(middle, three, 3, block.stride)))
        deep = (
            convolution(read, inner, 1),
            convolution(inner, double, 3),
            convolution(double, double, 3, block.stride),
        )
        ways.append(nn.Sequential(*deep))
        pooled: nn.Module = (
            nn.MaxPool2d(3, block.stride, padding=1) if block.largest else nn.AvgPool2d(3, block.stride, padding=1)
        )
        ways.append(nn.Sequential(pooled, convolution(read, block.pool, 1)) if block.pool else nn.Sequential(pooled))
        self.ways = nn.ModuleList(ways)
        self.gives = block.one + three + double + (block.pool or read)

    def forward(self, x: Tensor) -> Tensor:
        """[B, read, H, W] to [B, gives, H / stride, W / stride]."""
        return torch.cat([way(x) for way in self.ways], dim=1)


class BnInception(nn.Module):
    """The whole network up to its features."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            convolution(channels, 64, 7, 2),
            nn.MaxPool2d(3, 2, padding=1),
            convolution(64, 64, 1),
            convolution(64, 192, 3),
            nn.MaxPool2d(3, 2, padding=1),
        )
        blocks, read = [], 192
        for block in BLOCKS:
            blocks.append(Inception(read, block))
            read = blocks[-1].gives
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, channels, H, W] to features [B, 1024], the mean over places."""
        seen: Tensor = self.blocks(self.stem(x)).mean(dim=(2, 3))
        return seen
