"""Shape of a vision transformer, and normalisation of its images."""

from collections.abc import Mapping
from typing import Final, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from trimtab_pipelines.resource import Model

Activation = Literal["GELU", "GELUTanh", "QuickGELU"]
"""As timm calls them: GELU, its approximation by tanh, and x · sigmoid(1.702 x)."""
Normalisation = Literal["None", "Image", "ImageNet", "Half", "CLIP"]
"""None: done by the caller. Image: by the mean and deviation of each image. Others: by fixed values."""
FIXED: Final[Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]] = {
    "ImageNet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "Half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "CLIP": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}
"""Mean and deviation of each channel, as in timm."""
_MIN_DEVIATION = 0.02


class ViTConfig(Model):
    """Sizes of a vision transformer."""

    side: int = Field(ge=1, description="Image side in pixels")
    patch: int = Field(ge=1, description="Patch side in pixels")
    channels: int = Field(default=3, ge=1)
    width: int = Field(ge=1, description="Token dimension")
    depth: int = Field(ge=1, description="Layers")
    heads: int = Field(ge=1, description="Attention heads")
    inner: int = Field(ge=1, description="MLP dimension")
    epsilon: float = Field(default=1e-6, gt=0, description="Added to variances by the normalisations")
    activation: Activation = Field(default="GELU", description="Activation of the MLP")
    registers: int = Field(default=0, ge=0, description="Register tokens besides the class token")
    embedded: bool = Field(default=True, description="Whether class token and registers have a position embedding")
    pooling: Literal["Token", "Mean"] = Field(default="Token", description="Features of the head")
    scaled: bool = Field(default=False, description="Whether residual branches have LayerScale")
    keys_normalised: bool = Field(default=False, description="Whether queries and keys are normalised, head by head")
    normalised_first: bool = Field(default=False, description="Whether tokens are normalised before the first layer")

    @model_validator(mode="after")
    def _fits(self) -> "ViTConfig":
        if self.side % self.patch:
            raise ValueError(f"a side of {self.side} pixels is not divisible by a patch of {self.patch}")
        if self.width % self.heads:
            raise ValueError(f"a width of {self.width} is not divisible by {self.heads} heads")
        return self

    @property
    def patches(self) -> int:
        return (self.side // self.patch) ** 2

    @property
    def leading(self) -> int:
        """Tokens before the patches: the class token and the registers."""
        return 1 + self.registers


def _vit_16(width: int, depth: int, heads: int) -> ViTConfig:
    return ViTConfig(side=224, patch=16, width=width, depth=depth, heads=heads, inner=4 * width)


SHAPES = {
    "tiny": _vit_16(192, 12, 3),
    "small": _vit_16(384, 12, 6),
    "base": _vit_16(768, 12, 12),
    "large": _vit_16(1024, 24, 16),
}
"""ViT-Ti/16, S/16, B/16 and L/16 (Dosovitskiy et al. 2021, table 1; Touvron et al. 2021, table 1)."""


def preprocess(images: Tensor, normalisation: Normalisation) -> Tensor:
    """Normalise images [B, C, H, W], uint8 or 0…1."""
    if images.dtype == torch.uint8:
        images = images.float() / 255
    if normalisation == "None":
        return images
    if normalisation == "Image":
        centred = images - images.mean(dim=(1, 2, 3), keepdim=True)
        deviation = centred.square().mean(dim=(1, 2, 3), keepdim=True).sqrt()
        return centred / (deviation + _MIN_DEVIATION)
    mean, deviation = (images.new_tensor(values)[:, None, None] for values in FIXED[normalisation])
    return (images - mean) / deviation
