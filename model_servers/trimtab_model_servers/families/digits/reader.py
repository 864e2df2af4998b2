"""`Reader`: a network that classifies the digit of a crop."""

from typing import Final

import torch
import torch.nn.functional as fn
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from trimtab_model_servers.families.digits import Calibration
from trimtab_model_servers.families.digits.layers import stage
from trimtab_pipelines.operating_point import OperatingPoint

CLASSES: Final = 10
_CROP_SIDE_PX: Final = 28
_SHIFTS: Final = ((0, 0), (-2, 0), (2, 0), (0, -2), (0, 2))
"""Offsets of a crop's views, in pixels: locators are rarely off by more."""


class ReaderConfig(BaseModel):
    """Sizes of a reader."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    side: int = Field(default=_CROP_SIDE_PX, description="the crop is resized to this side first", ge=14)
    widths: tuple[int, ...] = Field(description="channels of each stage", min_length=1)
    blocks: tuple[int, ...] = Field(description="residual blocks of each stage")
    strides: tuple[int, ...] = Field(description="resolution divisor of each stage")
    views: int = Field(
        default=1, ge=1, le=len(_SHIFTS), description="shifted views of each crop whose probabilities are averaged"
    )


class Reader(nn.Module):
    """Variant of stage `read`: crops in, digits out."""

    def __init__(self, config: ReaderConfig) -> None:
        super().__init__()
        self.side: Final = config.side
        self.views: Final = config.views
        self.calibration = Calibration()
        plan = zip((1, *config.widths), config.widths, config.blocks, config.strides, strict=False)
        self.stages = nn.Sequential(
            *(stage(inputs, outputs, blocks, stride=stride) for inputs, outputs, blocks, stride in plan)
        )
        self.classes = nn.Linear(config.widths[-1] * 2, CLASSES)

    def logits(self, crops: Tensor) -> Tensor:
        """Map uint8 crops [B, 1, 28, 28], standardised since ink may be light or dark, to scores [B, 10]."""
        x = crops.to(self.classes.weight.dtype)
        x = x - x.mean(dim=(2, 3), keepdim=True)
        x = x / (x.square().mean(dim=(2, 3), keepdim=True).sqrt() + 4)
        x = x.contiguous(memory_format=torch.channels_last)
        if self.side == _CROP_SIDE_PX // 2:
            x = fn.avg_pool2d(x, 2)
        elif self.side != _CROP_SIDE_PX:
            x = fn.interpolate(x, size=(self.side, self.side), mode="bilinear", align_corners=False)
        x = self.stages(x)
        pooled = torch.cat([x.mean(dim=(2, 3)), x.amax(dim=(2, 3))], dim=1)
        scores: Tensor = self.classes(pooled)
        return scores

    def forward(self, crops: Tensor) -> tuple[Tensor, Tensor]:
        """Classify uint8 crops [B, 1, 28, 28]: digits int64 [B] and their confidences float32 [B]."""
        probabilities = self.logits(self._shift(crops)).float().softmax(dim=1)
        confidence, digit = probabilities.view(self.views, -1, CLASSES).mean(dim=0).max(dim=1)
        return digit, self.calibration.apply(confidence)

    def _shift(self, crops: Tensor) -> Tensor:
        """Stack the views of all crops: [views * B, 1, 28, 28], the border repeated."""
        if self.views == 1:
            return crops
        wide = fn.pad(crops.to(self.classes.weight.dtype), (2, 2, 2, 2), mode="replicate")
        end = 2 + _CROP_SIDE_PX
        return torch.cat([wide[..., 2 + y : end + y, 2 + x : end + x] for x, y in _SHIFTS[: self.views]])

    def infer(self, inputs: dict[str, Tensor], point: OperatingPoint | None = None) -> dict[str, Tensor]:
        del point  # a single operating point
        digit, confidence = self(inputs["crop"])
        return {"digit": digit, "confidence": confidence}
