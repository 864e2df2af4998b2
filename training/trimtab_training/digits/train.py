"""``python -m trimtab_training.digits.train -o DIR``: train every variant anew and measure its accuracy.

Writes ``DIR/weights/VARIANT.safetensors`` and ``DIR/accuracy.json``. Seeds are fixed. Pages for training, for the
locators' threshold and for measuring come from one seed each; the last from the held-out sources.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from safetensors import safe_open

from trimtab_model_servers.families.digits.locator import Locator
from trimtab_model_servers.families.digits.reader import Reader
from trimtab_model_servers.families.digits.variants import VARIANTS, build, load, prepare_for_serving, save
from trimtab_training.digits import evaluate
from trimtab_training.digits.page_generator import Page, PageSource
from trimtab_training.digits.train_loops import calibrate, fit_locator, fit_reader
from trimtab_training.digits.training_pool import Pool, gather
from trimtab_training.optimizer import Schedule

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
    """Train one variant and write its weights."""
    schedule, started = SCHEDULES[variant], time.perf_counter()
    task = progress.add_task(variant, total=schedule.steps, note="")
    advance = _advancer(progress, task)
    network = build(variant, seed=schedule.seed)
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
    progress.update(task, note=f"{seconds:.0f} s")
    progress.console.print(f"{variant} trained in {seconds:.0f} s")


def measure_folder(folder: Path, progress: Progress) -> dict[str, object]:
    """Measure every variant whose weights lie in ``folder`` and describe the result as ``accuracy.json`` holds it."""
    paths = {name: folder / f"{name}.safetensors" for name in VARIANTS}
    networks = {name: load(path) for name, path in paths.items() if path.is_file()}
    locators = {name: network for name, network in networks.items() if isinstance(network, Locator)}
    readers = {name: network for name, network in networks.items() if isinstance(network, Reader)}
    task = progress.add_task("measure", total=len(networks), note="held-out pages")
    pages = PageSource("held-out", HELD_OUT_SEED).pages(0, HELD_OUT_PAGES)
    measurement = evaluate.measure(locators, readers, pages, lambda name: progress.update(task, advance=1, note=name))
    return {
        "split": "held-out by source image and photo region",
        "pages": HELD_OUT_PAGES,
        "page_seed": HELD_OUT_SEED,
        "interval": "Wilson, 95 %",
        "largest_product_error": round(measurement.largest_product_error, 4),
        "variants": {
            name: {**_rounded(accuracy), **_provenance(paths[name])} for name, accuracy in measurement.stages.items()
        },
        "pairs": [
            {
                "locate": pair.locate,
                "read": pair.read,
                **_rounded(pair.accuracy),
                "product": round(pair.product, 4),
            }
            for pair in measurement.pairs
        ],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, write, measure, write."""
    parser = argparse.ArgumentParser(description="Train the digits models anew and measure them.")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", choices=list(VARIANTS), action="append", help="train this variant; repeatable")
    parser.add_argument("--measure-only", action="store_true", help="train none, measure what is there")
    parser.add_argument("--threads", type=int, default=2, help="cores to train on (default 2)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    chosen = [] if options.measure_only else options.only or list(VARIANTS)
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True)) as progress:
        if chosen:
            pool = gather(_counted(PageSource("train", TRAINING_SEED), progress))
            for variant in chosen:
                train_variant(variant, pool, options.output / "weights", progress)
        report = measure_folder(options.output / "weights", progress)
    path = options.output / "accuracy.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    Console(stderr=True).print(f"wrote {path}")
    return 0


def _counted(source: PageSource, progress: Progress) -> list[Page]:
    task = progress.add_task("draw pages", total=TRAINING_PAGES, note="")
    pages = []
    for index in range(TRAINING_PAGES):
        pages.append(source.page(index))
        progress.update(task, advance=1)
    return pages


def _advancer(progress: Progress, task: TaskID) -> Callable[[float], None]:
    smooth = 0.0

    def advance(loss: float) -> None:
        nonlocal smooth
        smooth = loss if smooth == 0 else 0.98 * smooth + 0.02 * loss
        progress.update(task, advance=1, note=f"loss {smooth:.3f}")

    return advance


def _rounded(accuracy: evaluate.Accuracy) -> dict[str, float]:
    named = asdict(accuracy)
    named["accuracy"] = named.pop("value")
    return {key: round(number, 4) for key, number in sorted(named.items())}


def _provenance(path: Path) -> dict[str, float]:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        parameters = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118  (no mapping)
    trained = {key: float(metadata[key]) for key in ("seed", "steps", "batch", "training_seconds")}
    return {"parameters": parameters, "weights_bytes": path.stat().st_size, **trained}


if __name__ == "__main__":
    sys.exit(main())
