"""Pool of training pages as tensors, from which batches are sampled."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimtab_model_servers.families.digits import PAGE_SIDE_PX
from trimtab_model_servers.families.digits.locator import TYPICAL_SIDE_PX, cut_crops
from trimtab_training.digits.page_generator import MAX_DIGITS, Page

CENTRE_JITTER, SIZE_JITTER = 0.07, 0.09
"""Standard deviations of a crop's centre, as a share of its side, and of its log size: about those of locators."""

HEAT_RADIUS_PX = 3.0


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Stacked pages."""

    images: Tensor
    """uint8 [n, 1, 96, 96]."""
    boxes: Tensor
    """float32 [n, 3, 4]; rows beyond a page's digits lie far outside the page."""
    labels: Tensor
    """int64 [n, 3]; -1 pads."""


@dataclass(frozen=True, slots=True, eq=False)
class LocatorTarget:
    """Target of a locator's four maps."""

    heat: Tensor
    """[B, cells, cells], a Gaussian around each digit's centre."""
    geometry: Tensor
    """[B, 3, cells, cells], from each cell to its nearest digit: dx, dy in cells, log size."""


def gather(pages: Iterable[Page]) -> Pool:
    images, boxes, labels = [], [], []
    for page in pages:
        missing = MAX_DIGITS - len(page.labels)
        images.append(page.pixels)
        boxes.append(np.pad(page.boxes, ((0, missing), (0, 0)), constant_values=1e4))
        labels.append(np.pad(page.labels, (0, missing), constant_values=-1))
    return Pool(*(torch.from_numpy(np.stack(rows)) for rows in (images, boxes, labels)))


def locator_target(boxes: Tensor, cells: int) -> LocatorTarget:
    cell_px = PAGE_SIDE_PX / cells
    middles = (torch.arange(cells) + 0.5) * cell_px
    centres = (boxes[..., :2] + boxes[..., 2:]) / 2
    dx = centres[:, :, 0, None, None] - middles[None, None, None, :]
    dy = centres[:, :, 1, None, None] - middles[None, None, :, None]
    squared = dx.square() + dy.square()  # [B, 3, cells, cells]
    least, nearest = squared.min(dim=1)
    log_size = ((boxes[..., 2] - boxes[..., 0]).clamp(min=1) / TYPICAL_SIDE_PX).log()[..., None, None]
    components = (dx / cell_px, dy / cell_px, log_size)
    offsets = torch.stack([component.expand_as(squared) for component in components], dim=2)  # [B, digit, component, …]
    geometry = offsets.gather(1, nearest[:, None, None].expand(-1, 1, 3, -1, -1))[:, 0]
    return LocatorTarget(torch.exp(-least / (2 * HEAT_RADIUS_PX**2)), geometry)


def draw_crops(pool: Pool, count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Cut digits with the centre and size errors of a locator.

    Returns:
        Crops uint8 [count, 1, 28, 28] and labels int64 [count].
    """
    pages, digits = (pool.labels >= 0).nonzero(as_tuple=True)
    indices = torch.randint(len(pages), (count,), generator=random)
    pages, digits = pages[indices], digits[indices]
    box = pool.boxes[pages, digits]
    side = (box[:, 2] - box[:, 0])[:, None]
    shift, growth = torch.randn((count, 2), generator=random), torch.randn((count, 1), generator=random)
    centre = (box[:, :2] + box[:, 2:]) / 2 + shift * CENTRE_JITTER * side
    half = side / 2 * torch.exp(growth * SIZE_JITTER)
    return cut_crops(pool.images, pages, torch.cat([centre - half, centre + half], 1)), pool.labels[pages, digits]


def invert_some(images: Tensor, random: torch.Generator) -> Tensor:
    """Invert half of the images, since ink may be lighter or darker than the page."""
    return torch.where(torch.rand(len(images), 1, 1, 1, generator=random) < 0.5, 255 - images, images)
