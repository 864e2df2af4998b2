"""The shape of a vision transformer: what must be known beside its tensors to run it."""

from typing import Literal

from pydantic import Field, model_validator

from trimtab_pipelines.resource import Model

Activation = Literal["GELU", "GELUTanh", "QuickGELU"]
"""As timm calls them: GELU, its approximation by tanh, and x · sigmoid(1.702 x)."""


class ViTConfig(Model):
    """Sizes of a vision transformer, as its weights have them."""

    side: int = Field(ge=1, description="Pixels a side of its images")
    patch: int = Field(ge=1, description="Pixels a side of a patch")
    channels: int = Field(default=3, ge=1)
    width: int = Field(ge=1, description="Numbers a token has")
    depth: int = Field(ge=1, description="Layers")
    heads: int = Field(ge=1, description="Heads of attention")
    inner: int = Field(ge=1, description="Width of the perceptron in each layer")
    epsilon: float = Field(default=1e-6, gt=0, description="Added to variances by the normalisations")
    activation: Activation = Field(default="GELU", description="Between the two layers of a perceptron")
    registers: int = Field(default=0, ge=0, description="Learned tokens beside the class token")
    embedded: bool = Field(default=True, description="Whether class token and registers have a place embedding")
    pooling: Literal["Token", "Mean"] = Field(default="Token", description="What the head reads")
    scaled: bool = Field(default=False, description="Whether residual branches are scaled, as LayerScale does")
    keys_normalised: bool = Field(default=False, description="Whether queries and keys are normalised, head by head")
    normalised_first: bool = Field(default=False, description="Whether tokens are normalised before the first layer")

    @model_validator(mode="after")
    def _fits(self) -> "ViTConfig":
        if self.side % self.patch:
            raise ValueError(f"images of {self.side} pixels cannot be cut into patches of {self.patch}")
        if self.width % self.heads:
            raise ValueError(f"{self.width} numbers a token cannot be divided among {self.heads} heads")
        return self

    @property
    def patches(self) -> int:
        """Tokens of an image."""
        return (self.side // self.patch) ** 2

    @property
    def leading(self) -> int:
        """Tokens before the patches: the class token and the registers."""
        return 1 + self.registers


def _published(width: int, depth: int, heads: int) -> ViTConfig:
    return ViTConfig(side=224, patch=16, width=width, depth=depth, heads=heads, inner=4 * width)


SHAPES = {
    "tiny": _published(192, 12, 3),
    "small": _published(384, 12, 6),
    "base": _published(768, 12, 12),
    "large": _published(1024, 24, 16),
}
"""ViT-Ti/16, S/16, B/16 and L/16 (Dosovitskiy et al. 2021, table 1; Touvron et al. 2021, table 1)."""
