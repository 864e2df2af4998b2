"""Training of the digits pipeline: `python -m trimtab_training.digits.train -o DIR`.

Writes `DIR/weights/VARIANT.safetensors` and `DIR/accuracy.json`. Seeds are fixed: one for training pages, one for the
pages that calibrate the locators' threshold, one for held-out pages.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from rich.progress import Progress

from trimtab_model_servers.families.digits.family import VARIANTS, build_network, load, prepare_for_serving, save
from trimtab_model_servers.families.digits.locator import Locator
from trimtab_model_servers.families.digits.reader import Reader
from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_training.digits import evaluate
from trimtab_training.digits.page_generator import Page, PageSource
from trimtab_training.digits.train_loops import calibrate, fit_locator, fit_reader
from trimtab_training.digits.training_pool import Pool, gather
from trimtab_training.trainer import Schedule, argument_parser, loss_bar, training_progress, weights_entry, write_report

TRAINING_PAGES: Final = 16_000
CALIBRATION_PAGES: Final = 1_000
HELD_OUT_PAGES: Final = 12_000
TRAINING_SEED, CALIBRATION_SEED, HELD_OUT_SEED = 11, 12, 13

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


def train_variant(variant: str, pool: Pool, folder: Path, progress: Progress) -> None:
    schedule, started = SCHEDULES[variant], time.perf_counter()
    advance = loss_bar(progress, variant, schedule.steps)
    network = build_network(variant, seed=schedule.seed)
    if isinstance(network, Locator):
        fit_locator(network, pool, schedule, advance)
        calibrate(prepare_for_serving(network), PageSource("train", CALIBRATION_SEED), 0, CALIBRATION_PAGES)
    else:
        fit_reader(network, pool, schedule, advance)
        prepare_for_serving(network)
    seconds = time.perf_counter() - started
    folder.mkdir(parents=True, exist_ok=True)
    training = {
        "seed": str(schedule.seed),
        "steps": str(schedule.steps),
        "batch": str(schedule.batch),
        "training_seconds": f"{seconds:.0f}",
    }
    save(network, VARIANTS[variant], folder / f"{variant}.safetensors", training)
    progress.console.print(f"{variant} trained in {seconds:.0f} s")


def measure_folder(folder: Path, progress: Progress) -> dict[str, object]:
    """Measure every variant with weights in `folder`; return the content of `accuracy.json`."""
    paths = {name: folder / f"{name}.safetensors" for name in VARIANTS}
    networks = {name: load(path) for name, path in paths.items() if path.is_file()}
    locators = {name: network for name, network in networks.items() if isinstance(network, Locator)}
    readers = {name: network for name, network in networks.items() if isinstance(network, Reader)}
    task = progress.add_task("measure", total=len(networks), note="held-out pages")
    pages = PageSource("held-out", HELD_OUT_SEED).pages(0, HELD_OUT_PAGES)
    measurement = evaluate.measure(locators, readers, pages, lambda name: progress.update(task, advance=1, note=name))
    keys = ("seed", "steps", "batch", "training_seconds")
    return {
        "split": "held-out by source image and photo region",
        "pages": HELD_OUT_PAGES,
        "page_seed": HELD_OUT_SEED,
        "interval": "Wilson, 95 %",
        "largest_product_error": round(measurement.largest_product_error, 4),
        "variants": {
            name: {**_entry(accuracy), **weights_entry(paths[name], keys)}
            for name, accuracy in measurement.stages.items()
        },
        "pairs": [
            {"locate": pair[0], "read": pair[1], **_entry(accuracy), "product": round(measurement.product(pair), 4)}
            for pair, accuracy in sorted(measurement.pairs.items(), key=lambda item: list(networks).index(item[0][0]))
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the chosen variants, then measure all."""
    parser = argument_parser("Train and measure the models of the digits pipeline.", threads=2)
    parser.add_argument("--only", choices=list(VARIANTS), action="append", help="train this variant; repeatable")
    parser.add_argument("--measure-only", action="store_true", help="measure existing weights without training")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    variants = [] if options.measure_only else options.only or list(VARIANTS)
    with training_progress() as progress:
        if variants:
            pool = gather(_draw_pages(PageSource("train", TRAINING_SEED), progress))
            for variant in variants:
                train_variant(variant, pool, options.output / "weights", progress)
        report = measure_folder(options.output / "weights", progress)
    write_report(options.output / "accuracy.json", report)
    return 0


def _draw_pages(source: PageSource, progress: Progress) -> list[Page]:
    indices = progress.track(range(TRAINING_PAGES), task_id=progress.add_task("draw pages", note=""))
    return [source.page(index) for index in indices]


def _entry(accuracy: Accuracy) -> dict[str, float | None]:
    return {"accuracy": accuracy.value, "high": accuracy.high, "low": accuracy.low, "n": accuracy.samples}


if __name__ == "__main__":
    sys.exit(main())
