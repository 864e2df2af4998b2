"""`Locator`: a heat map of digit centres, decoded to boxes, and the crops of these boxes.

Crops are cut here, so that a page is transferred once and readers get inputs of one size.
"""

import math
from typing import Final

import torch
import torch.nn.functional as fn
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from trimtab_model_servers.families.digits import PAGE_SIDE_PX, Calibration
from trimtab_model_servers.families.digits.layers import Convolution, stage
from trimtab_pipelines.operating_point import OperatingPoint

CROP_SIDE_PX: Final = 28
MAX_OBJECTS: Final = 4
TYPICAL_SIDE_PX: Final = 27.0
"""Side of the box of a cell that predicts log size 0."""

_PEAK_RADIUS_PX: Final = 9.0
"""A centre is a peak if no score within about this distance is higher; digits lie at least 20 px apart."""


class LocatorConfig(BaseModel):
    """Sizes of a locator."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    side: int = Field(description="the page is resized to this side first; a multiple of 16", multiple_of=16, ge=32)
    widths: tuple[int, ...] = Field(description="channels at strides 2, 4, 8, … of the resized page", min_length=2)
    blocks: tuple[int, ...] = Field(description="residual blocks at each of those strides")
    neck: int = Field(description="channels of the map from which centres are read", gt=0)
    views: int = Field(default=1, ge=1, le=2, description="2 averages the maps of the page and of its negative")


class LocatorNetwork(nn.Module):
    """uint8 pages [B, 1, 96, 96] to maps [B, 4, side/4, side/4]: logit of a centre, its dx, dy in cells, log size."""

    def __init__(self, config: LocatorConfig) -> None:
        super().__init__()
        self.side: Final = config.side
        widths = (1, *config.widths)
        self.stages = nn.ModuleList(
            stage(inputs, outputs, blocks)
            for inputs, outputs, blocks in zip(widths, config.widths, config.blocks, strict=False)
        )
        self.laterals = nn.ModuleList(
            Convolution(width, config.neck, size=1, active=False) for width in config.widths[1:]
        )
        self.head = Convolution(config.neck, config.neck)
        self.maps = nn.Conv2d(config.neck, 4, 1)
        nn.init.constant_(self.maps.bias[:1] if self.maps.bias is not None else self.maps.weight, -4.0)

    def forward(self, pages: Tensor) -> Tensor:
        """Sum the maps of all stages at a quarter of the resolution."""
        x = pages.to(self.maps.weight.dtype).sub_(127.5).mul_(1 / 64)
        x = x.contiguous(memory_format=torch.channels_last)
        if self.side * 2 == PAGE_SIDE_PX:
            x = fn.avg_pool2d(x, 2)
        elif self.side != PAGE_SIDE_PX:
            x = fn.interpolate(x, size=(self.side, self.side), mode="bilinear", align_corners=False)
        levels: list[Tensor] = []
        for level in self.stages:
            x = level(x)
            levels.append(x)
        merged: Tensor | None = None
        for lateral, level_map in zip(reversed(self.laterals), reversed(levels[1:]), strict=True):
            lateral_map = lateral(level_map)
            merged = (
                lateral_map
                if merged is None
                else lateral_map + fn.interpolate(merged, scale_factor=2.0, mode="nearest")
            )
        if merged is None:
            raise ValueError("a locator needs at least two stages")
        maps: Tensor = self.maps(self.head(torch.relu(merged)))
        return maps


class Locator(nn.Module):
    """Variant of stage `locate`: pages in, boxes and crops of all objects out."""

    def __init__(self, config: LocatorConfig) -> None:
        super().__init__()
        self.network = LocatorNetwork(config)
        self.views: Final = config.views
        self.calibration = Calibration()
        self.threshold: Tensor
        self.register_buffer("threshold", torch.tensor(0.4))

    def forward(self, pages: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Find at most four objects per page, uint8 [B, 1, 96, 96].

        Returns `count` int64 [B]; `boxes` float32 [N, 4], x0 y0 x1 y1 in pixels; `crops` uint8 [N, 1, 28, 28];
        `confidence` float32 [B], that all boxes of a page are right and none is missing. N is the sum of `count`; rows
        are in page order, best score first.
        """
        boxes, scores = decode(self.maps(pages))
        detected = scores >= self.threshold
        page_of_row, _ = detected.nonzero(as_tuple=True)
        boxes = boxes[detected]
        margin = (scores.logit(1e-6) - self.threshold.logit()).abs().amin(dim=1)  # of the box decided most narrowly
        return (
            detected.sum(dim=1),
            boxes,
            cut_crops(pages, page_of_row, boxes),
            self.calibration.apply(margin.sigmoid()),
        )

    def maps(self, pages: Tensor) -> Tensor:
        """Average the network's maps over all views: float32 [B, 4, cells, cells]."""
        views = torch.cat([pages, 255 - pages]) if self.views > 1 else pages
        maps: Tensor = self.network(views).float()
        return maps.view(self.views, len(pages), *maps.shape[1:]).mean(dim=0) if self.views > 1 else maps

    def infer(self, inputs: dict[str, Tensor], point: OperatingPoint | None = None) -> dict[str, Tensor]:
        del point  # a single operating point
        count, boxes, crops, confidence = self(inputs["image"])
        return {"count": count, "boxes": boxes, "crops": crops, "confidence": confidence}


def decode(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Decode the four highest peaks of each map: boxes [B, 4, 4] in pixels and scores [B, 4] in 0…1, best first."""
    cells = maps.shape[-1]
    cell_px = PAGE_SIDE_PX / cells
    reach = max(1, round(_PEAK_RADIUS_PX / cell_px))
    logits = maps[:, :1]
    highest = fn.max_pool2d(logits, 2 * reach + 1, stride=1, padding=reach)
    peaks = logits.masked_fill(logits < highest, -math.inf).flatten(1)
    best, index = peaks.topk(MAX_OBJECTS, dim=1)  # [B, 4]
    geometry = maps[:, 1:].flatten(2).gather(2, index[:, None, :].expand(-1, 3, -1))  # [B, 3, 4]
    cell = torch.stack([index % cells, index // cells], dim=1)  # [B, 2, 4]: x, y
    centres = (cell + 0.5 + geometry[:, :2]) * cell_px
    halves = geometry[:, 2:].clamp(-1, 1).exp() * (TYPICAL_SIDE_PX / 2)
    boxes = torch.cat([centres - halves, centres + halves], dim=1).transpose(1, 2)
    return boxes.clamp(0, PAGE_SIDE_PX), best.sigmoid()


def cut_crops(pages: Tensor, page_of_row: Tensor, boxes: Tensor) -> Tensor:
    """Resample boxes [N, 4] of uint8 pages [B, 1, H, W], borders repeated, to uint8 [N, 1, 28, 28], bilinearly."""
    height, width = pages.shape[-2:]
    steps = (torch.arange(CROP_SIDE_PX, dtype=torch.float32, device=boxes.device) + 0.5) / CROP_SIDE_PX
    low, extent = boxes[:, :2, None], (boxes[:, 2:] - boxes[:, :2])[:, :, None]
    positions = low + extent * steps - 0.5  # [N, 2, 28]: x, y of pixel centres
    x, y = positions[:, 0].clamp(0, width - 1), positions[:, 1].clamp(0, height - 1)
    left, top = x.long().clamp_(max=width - 2), y.long().clamp_(max=height - 2)
    right_share, low_share = (x - left)[:, None, :], (y - top)[:, :, None]
    index = (page_of_row[:, None] * height + top)[:, :, None] * width + left[:, None, :]  # [N, 28, 28]
    flat = pages.reshape(-1)
    upper = torch.lerp(flat[index].float(), flat[index + 1].float(), right_share)
    index = index + width
    lower = torch.lerp(flat[index].float(), flat[index + 1].float(), right_share)
    return torch.lerp(upper, lower, low_share).round_().to(torch.uint8)[:, None]
