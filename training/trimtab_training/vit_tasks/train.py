"""``python -m trimtab_training.vit_tasks.train -o DIR``: train transformer and heads, and measure them.

Writes ``DIR/weights/vit-tasks.safetensors`` and ``DIR/accuracy.json``. Seeds are fixed. The transformer learns from the
crops alone; then it is frozen, and every other task gets a head; then every point and task its temperature.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trimtab_model_servers.transformer.checkpoints import Checkpoint, load, save, store_temperatures
from trimtab_model_servers.transformer.config import ViTConfig
from trimtab_model_servers.transformer.prompt_selection import PLAIN
from trimtab_model_servers.transformer.tasks import Head
from trimtab_model_servers.transformer.transformer import VisionTransformer
from trimtab_training.vit_tasks import calibration, evaluate
from trimtab_training.vit_tasks.datasets import CLASSES, SIDE_PX, TASKS, Images
from trimtab_training.vit_tasks.labelled_samples import MOST, SEED
from trimtab_training.vit_tasks.operating_points import COMPARED, POINTS
from trimtab_training.vit_tasks.train_loops import Training, fit_head, fit_transformer, initialise

SHAPE: Final = ViTConfig(side=SIDE_PX, patch=4, channels=1, width=64, depth=8, heads=2, inner=256)
TRANSFORMER: Final = Training(steps=1200, batch=128, peak_rate=1.5e-3, seed=3)
HEADS: Final = Training(steps=600, batch=256, peak_rate=1e-2, seed=5, weight_decay=1e-4)
TRAINING_IMAGES: Final = {"crops": 40_000, "digits": 4_000, "turned": 4_000, "faces": 1_000}
TRAINING_SEED: Final = 1
LEARNED_FROM: Final = "crops"
WEIGHTS: Final = "weights/vit-tasks.safetensors"


def train_transformer(advance: Callable[[float], None]) -> tuple[VisionTransformer, Head]:
    """Train the transformer and its head on the crops."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TRANSFORMER.seed)
        transformer = VisionTransformer(SHAPE)
        initialise(transformer, TRANSFORMER.seed)
        classes = len(CLASSES[LEARNED_FROM])
        head = fit_transformer(transformer, _images(LEARNED_FROM), classes, TRANSFORMER, advance)
    return transformer.eval().requires_grad_(requires_grad=False), head


def with_heads(transformer: VisionTransformer, head: Head, tell: Callable[[str], None]) -> Checkpoint:
    """Train the heads of the other tasks on what the transformer has learned."""
    heads = {}
    for task in TASKS:
        heads[task] = head if task == LEARNED_FROM else fit_head(transformer, _images(task), len(CLASSES[task]), HEADS)
        tell(task)
    return Checkpoint(transformer, {PLAIN: heads}, CLASSES, "Image")


def measured(stored: Checkpoint, tell: Callable[[str], None]) -> tuple[dict[str, object], calibration.Temperatures]:
    """Measure every served point, and those that they are held against; and the temperatures of the served."""
    held_out = {task: draw("held-out", MOST, SEED) for task, draw in TASKS.items()}
    scored = evaluate.at_points(stored, [*POINTS, *COMPARED], held_out, tell)
    found = evaluate.report(evaluate.hits_of(scored)) | {"confidence": calibration.mean_confidence(scored, POINTS)}
    return found, calibration.temperatures(scored, POINTS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, write, measure, write."""
    parser = argparse.ArgumentParser(description="Train the small vision transformer and its heads anew.")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--measure-only", action="store_true", help="train none, measure what is there")
    parser.add_argument("--threads", type=int, default=1, help="cores to train on (default 1)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    path = options.output / WEIGHTS
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True)) as progress:
        if not options.measure_only:
            _train(path, progress)
        bar = progress.add_task("measure", total=len(POINTS) + len(COMPARED), note="")
        found, fitted = measured(load(path), lambda name: progress.update(bar, advance=1, note=name))
    (options.output / "accuracy.json").write_text(json.dumps(found, indent=2) + "\n")
    store_temperatures(path, fitted)
    return 0


def _train(path: Path, progress: Progress) -> None:
    started = time.perf_counter()
    bar = progress.add_task("transformer", total=TRANSFORMER.steps, note=LEARNED_FROM)
    transformer, head = train_transformer(lambda loss: progress.update(bar, advance=1, note=f"loss {loss:.3f}"))
    seconds = f"{time.perf_counter() - started:.0f}"
    bar = progress.add_task("heads", total=len(TASKS), note="")
    stored = with_heads(transformer, head, lambda task: progress.update(bar, advance=1, note=task))
    save(stored, path, {"seed": str(TRANSFORMER.seed), "training_seconds": seconds})


def _images(task: str) -> Images:
    return TASKS[task]("train", TRAINING_IMAGES[task], TRAINING_SEED)


if __name__ == "__main__":
    sys.exit(main())
