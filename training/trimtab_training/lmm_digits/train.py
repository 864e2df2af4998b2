"""Training of the lmm-digits pipeline: `python -m trimtab_training.lmm_digits.train -o DIR`.

Writes `DIR/weights/{decoder-only,cross-attention}.safetensors`, `DIR/weights/tokenizer.json` and `DIR/accuracy.json`.
Seeds are fixed. Both models share one vision tower, which is trained once.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.progress import Progress
from tokenizers import Tokenizer
from torch import Tensor

from trimtab_model_servers.families.lmm_digits import models
from trimtab_model_servers.families.lmm_digits.models import ARCHITECTURES, Architecture, VisionTower
from trimtab_training.lmm_digits.batches import Questioner, character_ids, train_tokenizer
from trimtab_training.lmm_digits.evaluate import measure_folder
from trimtab_training.lmm_digits.page_generator import CellPageSource
from trimtab_training.lmm_digits.train_loops import AnswerTraining, compute_features, fit_tower
from trimtab_training.trainer import Schedule, argument_parser, loss_bar, training_progress, write_report

TRAINING_PAGES: Final = 20_000
TRAINING_SEED: Final = 21
TOWER: Final = Schedule(steps=1_800, batch=64, peak_rate=4e-3, seed=1)
ALIGNMENT: Final = Schedule(steps=400, batch=64, peak_rate=3e-3, seed=2)
ANSWERS: Final[dict[Architecture, Schedule]] = {
    "decoder-only": Schedule(steps=2_600, batch=64, peak_rate=2e-3, seed=3),
    "cross-attention": Schedule(steps=2_600, batch=64, peak_rate=2e-3, seed=4),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the chosen models, then measure all."""
    parser = argument_parser("Train and measure the models of the lmm-digits pipeline.")
    parser.add_argument("--only", choices=ARCHITECTURES, action="append", help="train this model; repeatable")
    parser.add_argument("--measure-only", action="store_true", help="measure existing weights without training")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    weights = options.output / "weights"
    with training_progress() as progress:
        if not options.measure_only:
            _train(options.only or ARCHITECTURES, weights, progress)
        report = measure_folder(weights, progress.console.print)
    write_report(options.output / "accuracy.json", report)
    return 0


def _train(architectures: Sequence[Architecture], weights: Path, progress: Progress) -> None:
    """Train the tower, then each model with it."""
    weights.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    tokenizer.save(str(weights / "tokenizer.json"))
    pages, cells = _draw_pages(progress)
    started = time.process_time()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(TOWER.seed)
        tower = VisionTower(models.WIDTH).to(memory_format=torch.channels_last)
    fit_tower(tower, pages, cells, TOWER, loss_bar(progress, "tower", TOWER.steps))
    features = compute_features(tower, pages)
    tower_seconds = time.process_time() - started
    for architecture in architectures:
        started, schedule = time.process_time(), ANSWERS[architecture]
        model = _train_model(architecture, tokenizer, tower, features, cells, progress)
        seconds = tower_seconds + time.process_time() - started
        training = {
            "seed": str(schedule.seed),
            "steps": str(schedule.steps),
            "batch": str(schedule.batch),
            "processor_seconds": f"{seconds:.0f}",
        }
        models.save(model, architecture, tokenizer, weights / f"{architecture}.safetensors", training)
        progress.console.print(
            f"{architecture} trained in {seconds:.0f} s of processor time, including {tower_seconds:.0f} s of the tower"
        )


def _train_model(
    architecture: Architecture,
    tokenizer: Tokenizer,
    tower: VisionTower,
    features: Tensor,
    cells: Tensor,
    progress: Progress,
) -> Any:
    schedule = ANSWERS[architecture]
    model = models.build(architecture, seed=schedule.seed)
    model_tower = models.tower(model)
    model_tower.load_state_dict(tower.state_dict())
    model_tower.eval()
    training = AnswerTraining(model, architecture, model_tower, features, character_ids(tokenizer))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(schedule.seed)
        training.align(cells, ALIGNMENT, loss_bar(progress, "align", ALIGNMENT.steps))
        page_tokens = models.placeholders(architecture)
        questioner = Questioner(tokenizer, cells.numpy(), page_tokens=page_tokens, seed=schedule.seed)
        training.answer(questioner, schedule, loss_bar(progress, architecture, schedule.steps))
    return models.prepare_for_serving(model)


def _draw_pages(progress: Progress) -> tuple[Tensor, Tensor]:
    source = CellPageSource("train", TRAINING_SEED)
    indices = progress.track(range(TRAINING_PAGES), task_id=progress.add_task("draw pages", note=""))
    pages = [source.page(index) for index in indices]
    return torch.from_numpy(np.stack([page.pixels for page in pages])), torch.tensor([page.cells for page in pages])


if __name__ == "__main__":
    sys.exit(main())
