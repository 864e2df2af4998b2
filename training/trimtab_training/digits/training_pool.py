"""Training pages as tensors: drawn once, then sampled in batches as often as a network needs."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimtab_model_servers.families.digits import PAGE_SIDE_PX
from trimtab_model_servers.families.digits.locator import TYPICAL_SIDE_PX, cut_crops
from trimtab_training.digits.page_generator import MAX_DIGITS, Page

CENTRE_JITTER, SIZE_JITTER = 0.07, 0.09
"""Standard deviation of a crop's place (share of its side) and of its log size: about what locators deliver."""

HEAT_RADIUS_PX = 3.0


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """Pages stacked.

    Attributes:
        images: uint8 [n, 1, 96, 96].
        boxes: float32 [n, 3, 4]; rows beyond a page's digits lie far outside the page.
        labels: int64 [n, 3]; -1 where there is no digit.
    """

    images: Tensor
    boxes: Tensor
    labels: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LocatorTarget:
    """What the four maps of a locator should say.

    Attributes:
        heat: [B, cells, cells], 1 at a digit's centre, falling off like a Gaussian.
        geometry: [B, 3, cells, cells], from each cell to its nearest digit: dx, dy in cells, log size.
    """

    heat: Tensor
    geometry: Tensor


def gather(pages: Iterable[Page]) -> Pool:
    """Stack ``pages`` into one pool."""
    images, boxes, labels = [], [], []
    for page in pages:
        missing = MAX_DIGITS - len(page.labels)
        images.append(page.pixels)
        boxes.append(np.pad(page.boxes, ((0, missing), (0, 0)), constant_values=1e4))
        labels.append(np.pad(page.labels, (0, missing), constant_values=-1))
    return Pool(*(torch.from_numpy(np.stack(rows)) for rows in (images, boxes, labels)))


def locator_target(boxes: Tensor, cells: int) -> LocatorTarget:
    """Draw the target maps for the true ``boxes`` [B, 3, 4]."""
    cell_px = PAGE_SIDE_PX / cells
    middles = (torch.arange(cells) + 0.5) * cell_px
    centres = (boxes[..., :2] + boxes[..., 2:]) / 2
    away_x = centres[:, :, 0, None, None] - middles[None, None, None, :]
    away_y = centres[:, :, 1, None, None] - middles[None, None, :, None]
    squared = away_x.square() + away_y.square()  # [B, 3, cells, cells]
    least, nearest = squared.min(dim=1)
    log_size = ((boxes[..., 2] - boxes[..., 0]).clamp(min=1) / TYPICAL_SIDE_PX).log()[..., None, None]
    numbers = (away_x / cell_px, away_y / cell_px, log_size)
    away = torch.stack([number.expand_as(squared) for number in numbers], dim=2)  # [B, 3 digits, 3 numbers, …]
    geometry = away.gather(1, nearest[:, None, None].expand(-1, 1, 3, -1, -1))[:, 0]
    return LocatorTarget(torch.exp(-least / (2 * HEAT_RADIUS_PX**2)), geometry)


def draw_crops(pool: Pool, count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Cut ``count`` digits as a locator would, a little beside and a little too large or small.

    Returns:
        Crops uint8 [count, 1, 28, 28] and labels int64 [count].
    """
    pages, digits = (pool.labels >= 0).nonzero(as_tuple=True)
    chosen = torch.randint(len(pages), (count,), generator=random)
    pages, digits = pages[chosen], digits[chosen]
    box = pool.boxes[pages, digits]
    side = (box[:, 2] - box[:, 0])[:, None]
    shift, growth = torch.randn((count, 2), generator=random), torch.randn((count, 1), generator=random)
    centre = (box[:, :2] + box[:, 2:]) / 2 + shift * CENTRE_JITTER * side
    half = side / 2 * torch.exp(growth * SIZE_JITTER)
    return cut_crops(pool.images, pages, torch.cat([centre - half, centre + half], 1)), pool.labels[pages, digits]


def invert_some(images: Tensor, random: torch.Generator) -> Tensor:
    """Swap dark and light in about half of ``images``: ink may be either."""
    return torch.where(torch.rand(len(images), 1, 1, 1, generator=random) < 0.5, 255 - images, images)
