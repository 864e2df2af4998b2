"""Training loops of locators and readers."""

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as fn
from torch import Tensor, nn

from trimtab_model_servers.families.digits.locator import Locator, decode
from trimtab_model_servers.families.digits.reader import Reader
from trimtab_training.digits.page_generator import PageScore, PageSource, score_page
from trimtab_training.digits.training_pool import Pool, draw_crops, invert_some, locator_target
from trimtab_training.trainer import Advance, Schedule, minimize

_GEOMETRY_WEIGHT: Final = 0.7
_THRESHOLDS: Final = tuple(step / 50 for step in range(5, 40))


def fit_locator(locator: Locator, pool: Pool, schedule: Schedule, advance: Advance) -> None:
    """Train a locator on the pages of a pool and leave it in evaluation mode."""
    random = torch.Generator().manual_seed(schedule.seed)
    cells = locator.network.side // 4

    def loss() -> Tensor:
        indices = torch.randint(len(pool.images), (schedule.batch,), generator=random)
        target = locator_target(pool.boxes[indices], cells)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            maps = locator.network(invert_some(pool.images[indices], random))
        return _locator_loss(maps.float(), target.heat, target.geometry)

    _train(locator.network, loss, schedule, advance)


def fit_reader(reader: Reader, pool: Pool, schedule: Schedule, advance: Advance) -> None:
    """Train a reader on crops of a pool's digits and leave it in evaluation mode."""
    random = torch.Generator().manual_seed(schedule.seed)

    def loss() -> Tensor:
        crops, labels = draw_crops(pool, schedule.batch, random)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = reader.logits(invert_some(crops, random))
        return fn.cross_entropy(logits.float(), labels, label_smoothing=0.05)

    _train(reader, loss, schedule, advance)


def calibrate(locator: Locator, source: PageSource, start: int, count: int) -> float:
    """Set the detection threshold that maximizes accuracy on pages of `source`, and return it."""
    pages = source.pages(start, count)
    totals = dict.fromkeys(_THRESHOLDS, PageScore(0, 0, 0))
    for low in range(0, count, 32):
        chunk = pages[low : low + 32]
        with torch.inference_mode():
            boxes, scores = decode(locator.maps(torch.stack([torch.from_numpy(page.pixels) for page in chunk])))
        for page, page_boxes, page_scores in zip(chunk, boxes.numpy(), scores.numpy(), strict=True):
            for threshold in _THRESHOLDS:
                detected = page_boxes[page_scores >= threshold]
                score = score_page(page, detected, -torch.ones(len(detected), dtype=torch.int64).numpy())
                totals[threshold] = PageScore(*(a + b for a, b in zip(totals[threshold], score, strict=True)))
    best = max(_THRESHOLDS, key=lambda threshold: totals[threshold].matched / totals[threshold].total)
    locator.threshold.fill_(best)
    return best


def _train(network: nn.Module, loss: Callable[[], Tensor], schedule: Schedule, advance: Advance) -> None:
    network.train()
    minimize(network.parameters(), loss, schedule, warm_up_share=0.15, max_gradient_norm=5.0, advance=advance)
    network.eval()


def _locator_loss(maps: Tensor, heat: Tensor, geometry: Tensor) -> Tensor:
    """Cross entropy weighted by the squared error of each cell, and the geometry's distance near centres."""
    logits = maps[:, 0]
    error = (logits.sigmoid() - heat).abs().detach()
    centre_loss = (error.square() * fn.binary_cross_entropy_with_logits(logits, heat, reduction="none")).sum()
    near = torch.where(heat > 0.3, heat, 0.0)
    distance = fn.smooth_l1_loss(maps[:, 1:], geometry, reduction="none", beta=0.2).sum(dim=1)
    return (centre_loss + _GEOMETRY_WEIGHT * (near * distance).sum()) / near.sum().clamp(min=1)
