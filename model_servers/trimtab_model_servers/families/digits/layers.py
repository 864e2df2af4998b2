"""Layers of the digits networks.

Each convolution has a batch normalisation during training; it is fused afterwards, so that saved and served networks
have plain convolutions.
"""

from typing import Final

import torch
from torch import Tensor, nn


class Convolution(nn.Module):
    """k x k convolution, batch normalisation while training, and ReLU unless `active` is false."""

    def __init__(self, inputs: int, outputs: int, *, size: int = 3, stride: int = 1, active: bool = True) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2)
        self.normalisation = nn.BatchNorm2d(outputs)
        self.active: Final = active

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, ceil(H / stride), ceil(W / stride)]."""
        x = self.normalisation(self.convolution(x))
        return torch.relu_(x) if self.active else x


class Residual(nn.Module):
    """Two convolutions with a shortcut, same width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = Convolution(width, width)
        self.second = Convolution(width, width, active=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.second(self.first(x)) + x)


def stage(inputs: int, outputs: int, blocks: int, *, stride: int = 2) -> nn.Sequential:
    """One resolution of a network: a convolution that changes width and stride, then residual blocks."""
    return nn.Sequential(Convolution(inputs, outputs, stride=stride), *(Residual(outputs) for _ in range(blocks)))
