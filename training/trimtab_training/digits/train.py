"""Training of the digits pipeline: `python -m trimtab_training.digits.train -o DIR`.

Writes `DIR/weights/VARIANT.safetensors`, and calibrations of confidences in `DIR/pipeline.yaml`.
Seeds are fixed: one for training pages, one for the pages that set the locators' threshold, one for held-out pages that
fit the calibrations. `trimtab evaluate` measures the variants, on other held-out pages.
"""

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as fn
from rich.progress import Progress
from torch import Tensor

from trimtab_model_servers.families.digits import PAGE_SIDE_PX, Calibration
from trimtab_model_servers.families.digits.family import VARIANTS, build_network, load, prepare_for_serving, save
from trimtab_model_servers.families.digits.locator import TYPICAL_SIDE_PX, Locator, cut_crops, decode
from trimtab_model_servers.families.digits.reader import Reader
from trimtab_training.digits.calibration import fit_calibration, score_rows, write_calibrations
from trimtab_training.digits.page_generator import MAX_DIGITS, Page, PageScore, PageSource, score_page
from trimtab_training.trainer import (
    Advance,
    Schedule,
    argument_parser,
    loss_bar,
    train_network,
    training_progress,
)

TRAINING_PAGES: Final = 16_000
THRESHOLD_PAGES: Final = 1_000
CALIBRATION_PAGES: Final = 6_000
TRAINING_SEED, THRESHOLD_SEED, CALIBRATION_SEED = 11, 12, 14

SCHEDULES: Final[dict[str, Schedule]] = {
    "locate-xs": Schedule(steps=3000, batch=32, peak_rate=4e-3, seed=1),
    "locate-s": Schedule(steps=2500, batch=32, peak_rate=4e-3, seed=2),
    "locate-m": Schedule(steps=2000, batch=32, peak_rate=4e-3, seed=3),
    "locate-l": Schedule(steps=2000, batch=32, peak_rate=4e-3, seed=4),
    "locate-xl": Schedule(steps=2200, batch=32, peak_rate=4e-3, seed=5),
    "read-xs": Schedule(steps=3000, batch=128, peak_rate=5e-3, seed=6),
    "read-s": Schedule(steps=2500, batch=128, peak_rate=4e-3, seed=7),
    "read-m": Schedule(steps=2000, batch=128, peak_rate=4e-3, seed=8),
    "read-l": Schedule(steps=2000, batch=128, peak_rate=4e-3, seed=9),
    "read-xl": Schedule(steps=3500, batch=128, peak_rate=4e-3, seed=10),
}
CYCLE: Final[dict[str, Any]] = {"warm_up_share": 0.15, "max_gradient_norm": 5.0}
_GEOMETRY_WEIGHT: Final = 0.7
_THRESHOLDS: Final = tuple(step / 50 for step in range(5, 40))
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
    """Cut digits with a locator's centre and size errors: uint8 [count, 1, 28, 28], and labels int64 [count]."""
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

    train_network(locator.network, loss, schedule, **CYCLE, advance=advance)


def fit_reader(reader: Reader, pool: Pool, schedule: Schedule, advance: Advance) -> None:
    """Train a reader on crops of a pool's digits and leave it in evaluation mode."""
    random = torch.Generator().manual_seed(schedule.seed)

    def loss() -> Tensor:
        crops, labels = draw_crops(pool, schedule.batch, random)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = reader.logits(invert_some(crops, random))
        return fn.cross_entropy(logits.float(), labels, label_smoothing=0.05)

    train_network(reader, loss, schedule, **CYCLE, advance=advance)


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


def _locator_loss(maps: Tensor, heat: Tensor, geometry: Tensor) -> Tensor:
    """Cross entropy weighted by the squared error of each cell, and the geometry's distance near centres."""
    logits = maps[:, 0]
    error = (logits.sigmoid() - heat).abs().detach()
    centre_loss = (error.square() * fn.binary_cross_entropy_with_logits(logits, heat, reduction="none")).sum()
    near = torch.where(heat > 0.3, heat, 0.0)
    distance = fn.smooth_l1_loss(maps[:, 1:], geometry, reduction="none", beta=0.2).sum(dim=1)
    return (centre_loss + _GEOMETRY_WEIGHT * (near * distance).sum()) / near.sum().clamp(min=1)


def train_variant(variant: str, pool: Pool, folder: Path, progress: Progress) -> None:
    schedule, started = SCHEDULES[variant], time.perf_counter()
    advance = loss_bar(progress, variant, schedule.steps)
    network = build_network(variant, seed=schedule.seed)
    if isinstance(network, Locator):
        fit_locator(network, pool, schedule, advance)
        calibrate(prepare_for_serving(network), PageSource("train", THRESHOLD_SEED), 0, THRESHOLD_PAGES)
    else:
        fit_reader(network, pool, schedule, advance)
        prepare_for_serving(network)
    seconds = time.perf_counter() - started
    folder.mkdir(parents=True, exist_ok=True)
    training = schedule.metadata() | {"training_seconds": f"{seconds:.0f}"}
    save(network, VARIANTS[variant], folder / f"{variant}.safetensors", training)
    progress.console.print(f"{variant} trained in {seconds:.0f} s")


def calibrate_folder(folder: Path) -> dict[str, tuple[Calibration, float]]:
    """Calibrations, and their errors, of every variant with weights in `folder`."""
    paths = {name: folder / f"{name}.safetensors" for name in VARIANTS}
    networks = {name: load(path) for name, path in paths.items() if path.is_file()}
    rows = score_rows(networks, PageSource("held-out", CALIBRATION_SEED).pages(0, CALIBRATION_PAGES))
    return {name: fit_calibration(scored) for name, scored in rows.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the chosen variants, then calibrate all."""
    parser = argument_parser("Train the models of the digits pipeline.", VARIANTS, threads=2)
    parser.add_argument("--calibrate-only", action="store_true", help="calibrate existing weights without training")
    options = parser.parse_args(arguments)
    weights = options.output / "weights"
    with training_progress(options.threads) as progress:
        if not options.calibrate_only:
            pool = gather(_draw_pages(PageSource("train", TRAINING_SEED), progress))
            for variant in options.only or list(VARIANTS):
                train_variant(variant, pool, weights, progress)
        calibrations = calibrate_folder(weights)
        for name, (_, error) in calibrations.items():
            progress.console.print(f"{name}: calibration error {error:.4f}")
    write_calibrations(options.output / "pipeline.yaml", {name: fitted for name, (fitted, _) in calibrations.items()})
    return 0


def _draw_pages(source: PageSource, progress: Progress) -> list[Page]:
    indices = progress.track(range(TRAINING_PAGES), task_id=progress.add_task("draw pages", note=""))
    return [source.page(index) for index in indices]


if __name__ == "__main__":
    sys.exit(main())
