"""Layers of the digits networks.

Each convolution has a batch normalisation during training; `fold` merges it afterwards, so that saved and served
networks have plain convolutions.
"""

from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval


class Convolution(nn.Module):
    """k x k convolution, batch normalisation while training, and ReLU unless `active` is false."""

    def __init__(self, inputs: int, outputs: int, *, size: int = 3, stride: int = 1, active: bool = True) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2)
        self.normalisation: nn.Module = nn.BatchNorm2d(outputs)
        self.active: Final = active

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, ceil(H / stride), ceil(W / stride)]."""
        x = self.normalisation(self.convolution(x))
        return torch.relu_(x) if self.active else x

    def fold(self) -> None:
        """Merge the normalisation's running statistics into the convolution; no effect if already merged."""
        if isinstance(self.normalisation, nn.BatchNorm2d):
            self.convolution = fuse_conv_bn_eval(self.convolution.eval(), self.normalisation.eval())
            self.normalisation = nn.Identity()


class Residual(nn.Module):
    """Two convolutions with a shortcut, same width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = Convolution(width, width)
        self.second = Convolution(width, width, active=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, width, H, W] to the same shape."""
        return torch.relu_(self.second(self.first(x)) + x)


def stage(inputs: int, outputs: int, blocks: int, *, stride: int = 2) -> nn.Sequential:
    """One resolution of a network: a convolution that changes width and stride, then residual blocks."""
    return nn.Sequential(Convolution(inputs, outputs, stride=stride), *(Residual(outputs) for _ in range(blocks)))


def fold(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, Convolution):
            module.fold()
