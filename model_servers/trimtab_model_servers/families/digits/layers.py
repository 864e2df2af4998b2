"""Layers of the digits networks.

Each convolution has a batch normalisation during training; `fold` merges it afterwards, so that saved and served
networks have plain convolutions.
"""

from typing import Final

import torch
from torch import Tensor, nn


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
        norm = self.normalisation
        if not isinstance(norm, nn.BatchNorm2d):
            return
        if norm.running_mean is None or norm.running_var is None:
            raise TypeError("a normalisation without running statistics cannot be folded")
        with torch.no_grad():
            gain = norm.weight / torch.sqrt(norm.running_var + norm.eps)
            self.convolution.weight.mul_(gain[:, None, None, None])
            if self.convolution.bias is not None:
                self.convolution.bias.sub_(norm.running_mean).mul_(gain).add_(norm.bias)
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
