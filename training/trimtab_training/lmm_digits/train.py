"""``python -m trimtab_training.lmm_digits.train -o DIR``: train both models anew and measure their answers.

Writes ``DIR/weights/decoder-only.safetensors``, ``DIR/weights/cross-attention.safetensors``,
``DIR/weights/tokenizer.json`` and ``DIR/accuracy.json``. Seeds are fixed. The tower is trained once and serves both;
what is held out are handwriting and photo regions, as ``digits.sources`` splits them.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor

from trimtab_model_servers.families.lmm_digits import models
from trimtab_model_servers.families.lmm_digits.models import ARCHITECTURES, Architecture
from trimtab_model_servers.families.lmm_digits.vision_tower import VisionTower
from trimtab_training.lmm_digits import evaluate
from trimtab_training.lmm_digits.batches import Questioner, character_ids
from trimtab_training.lmm_digits.page_generator import CellPageSource
from trimtab_training.lmm_digits.tokenizer_training import train_tokenizer
from trimtab_training.lmm_digits.train_loops import Answering, Schedule, features_of, fit_tower

TRAINING_PAGES: Final = 20_000
TRAINING_SEED: Final = 21
TOWER: Final = Schedule(steps=1_800, batch=64, peak_rate=4e-3, seed=1)
ALIGNING: Final = Schedule(steps=400, batch=64, peak_rate=3e-3, seed=2)
ANSWERING: Final[dict[Architecture, Schedule]] = {
    "decoder-only": Schedule(steps=2_600, batch=64, peak_rate=2e-3, seed=3),
    "cross-attention": Schedule(steps=2_600, batch=64, peak_rate=2e-3, seed=4),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, write, measure, write."""
    parser = argparse.ArgumentParser(description="Train both small multimodal models anew and measure them.")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", choices=ARCHITECTURES, action="append", help="train this one; repeatable")
    parser.add_argument("--measure-only", action="store_true", help="train none, measure what is there")
    parser.add_argument("--threads", type=int, default=1, help="cores to train on (default 1)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    weights = options.output / "weights"
    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True)) as progress:
        if not options.measure_only:
            Training(weights, progress).run(options.only or ARCHITECTURES)
        report = evaluate.measure_folder(weights, progress.console.print)
    path = options.output / "accuracy.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    Console(stderr=True).print(f"wrote {path}")
    return 0


class Training:
    """One run: pages, tower, and the models that share it."""

    def __init__(self, weights: Path, progress: Progress) -> None:
        self._weights = weights
        self._progress = progress
        weights.mkdir(parents=True, exist_ok=True)

    def run(self, architectures: Sequence[Architecture]) -> None:
        """Train the tower, then each model on it."""
        tokenizer = train_tokenizer()
        tokenizer.save(str(self._weights / "tokenizer.json"))
        pages, cells = self._draw()
        started = time.process_time()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(TOWER.seed)
            tower = VisionTower(models.WIDTH).to(memory_format=torch.channels_last)
        fit_tower(tower, pages, cells, TOWER, self._advancer("tower", TOWER.steps))
        features = features_of(tower, pages)
        tower_seconds = time.process_time() - started
        for architecture in architectures:
            self._train(architecture, tokenizer, tower, features, cells, tower_seconds)

    def _train(
        self,
        architecture: Architecture,
        tokenizer: Tokenizer,
        tower: VisionTower,
        features: Tensor,
        cells: Tensor,
        tower_seconds: float,
    ) -> None:
        started, schedule = time.process_time(), ANSWERING[architecture]
        model = models.build(architecture, seed=schedule.seed)
        own = models.tower(model)
        own.load_state_dict(tower.state_dict())
        own.eval()
        learner = Answering(model, architecture, own, features, character_ids(tokenizer))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(schedule.seed)
            learner.align(cells, ALIGNING, self._advancer("align", ALIGNING.steps))
            page_tokens = models.placeholders(architecture)
            questioner = Questioner(tokenizer, cells.numpy(), page_tokens=page_tokens, seed=schedule.seed)
            learner.answer(questioner, schedule, self._advancer(architecture, schedule.steps))
        seconds = tower_seconds + time.process_time() - started
        told = {
            "seed": schedule.seed,
            "steps": schedule.steps,
            "batch": schedule.batch,
            "processor_seconds": round(seconds),
        }
        models.for_serving(model)
        path = self._weights / f"{architecture}.safetensors"
        models.save(model, architecture, tokenizer, path, {name: str(value) for name, value in told.items()})
        self._progress.console.print(
            f"{architecture} trained in {seconds:.0f} s of processor time, its tower's {tower_seconds:.0f} s among them"
        )

    def _draw(self) -> tuple[Tensor, Tensor]:
        task = self._progress.add_task("draw pages", total=TRAINING_PAGES, note="")
        source = CellPageSource("train", TRAINING_SEED)
        pixels, cells = [], []
        for index in range(TRAINING_PAGES):
            page = source.page(index)
            pixels.append(page.pixels)
            cells.append(page.cells)
            self._progress.update(task, advance=1)
        return torch.from_numpy(np.stack(pixels)), torch.tensor(cells)

    def _advancer(self, name: str, steps: int) -> Callable[[float], None]:
        task, smooth, done, started = self._progress.add_task(name, total=steps, note=""), 0.0, 0, time.process_time()

        def advance(loss: float) -> None:
            nonlocal smooth, done
            smooth, done = loss if smooth == 0 else 0.98 * smooth + 0.02 * loss, done + 1
            self._progress.update(task, advance=1, note=f"loss {smooth:.3f}")
            if done % 500 == 0:
                spent = time.process_time() - started
                self._progress.console.print(f"{name} {done} of {steps}: loss {smooth:.4f}, {spent:.0f} s")

        return advance


if __name__ == "__main__":
    sys.exit(main())
