"""``make bench NAME=prompts``: what training with merging wins back at the strongest merging, and what it takes.

On the finer twin of the small transformer: every task's held-out images at the plain point, with merging and a head
that knows of none, with a head that was trained while so much is merged, and with such a head and prompts; then batches
with prompts and without by turns, in processor time. Beside it, on the small one: the rule for strong merging against
ToMe's, at the strongest.
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress

from trimtab.options import console
from trimtab_model_servers.transformer.checkpoints import Checkpoint, load
from trimtab_model_servers.transformer.config import preprocess
from trimtab_model_servers.transformer.transformer import forward_plan
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.result_line import ResultLine, Threshold, threshold
from trimtab_training.task_training import task_logits, trained_prompt_variant
from trimtab_training.vit_tasks import train, train_finer_patches
from trimtab_training.vit_tasks.datasets import TASKS
from trimtab_training.vit_tasks.labelled_samples import MAX_PER_TASK, SEED
from trimtab_training.vit_tasks.operating_points import FULL, STRONG, STRONG_RULE, Hits, gain, merging

FOLDER = Path("pipelines/vit-tasks")
BATCH, ROUNDS = 16, 40
ALL = "all"
Figures = dict[str, float | int | str | None]


def hits(stored: Checkpoint, point: OperatingPoint, most: int) -> Hits:
    """Whether each held-out image is answered rightly at a point, by task."""
    found = {}
    for task, draw in TASKS.items():
        one = draw("held-out", most, SEED)
        found[task] = (task_logits(stored, point, task, one.pixels).argmax(dim=1) == one.labels).numpy()
    return found | {ALL: np.concatenate(list(found.values()))}


def won_back(stored: Checkpoint, most: int, progress: Progress) -> tuple[Figures, list[Threshold]]:
    """What was lost by merging, and won back by prompts, and by a head alone."""
    bar_ = progress.add_task("merging", total=1 + 3 * len(train_finer_patches.PROMPTED))
    full = hits(stored, FULL, most)
    progress.advance(bar_)
    figures: Figures = {}
    bars: list[Threshold] = []
    for merged, prompted in zip(train_finer_patches.STRONGEST, train_finer_patches.PROMPTED, strict=True):
        before = hits(train_finer_patches.plain(stored), merged, most)
        found = {"prompts": hits(stored, prompted, most), "a head alone": hits(stored, merged, most)}
        progress.advance(bar_, 3)
        lost = {task: float(full[task].mean() - before[task].mean()) for task in full}
        figures |= {f"{merged.name}: {task}: lost, points": 100 * one for task, one in lost.items()}
        for name, after in found.items():
            for task in full:
                won = {end: round(100 * one, 2) for end, one in gain(before[task], after[task]).items()}
                told = f"{won['gain']} ({won['low']}–{won['high']}), n {len(full[task])}"
                figures[f"{merged.name}: {task}: won back by {name}, points"] = told
            share = float(after[ALL].mean() - before[ALL].mean()) / lost[ALL]
            bars.append(threshold(f"{merged.name}: share of the loss won back by {name}", share, ">=", 0.5))
        more = 100 * (times(stored, merged, prompted) - 1)
        bars.append(threshold(f"{merged.name}: time that prompts take, % more", more, "<=", 3.0))
    return figures, bars


def times(stored: Checkpoint, merged: OperatingPoint, prompted: OperatingPoint) -> float:
    """Seconds of a batch with prompts, of those without: the median of rounds in which both take turns."""
    images = preprocess(TASKS["crops"]("held-out", BATCH, SEED).pixels, stored.normalisation)
    depth, taken = stored.transformer.shape.depth, {merged.name: list[float](), prompted.name: list[float]()}
    courses = {
        point.name: replace(
            forward_plan(point, depth),
            prompts=None if head.prompts is None else head.prompts.expand(BATCH, -1, -1, -1),
        )
        for point in (merged, prompted)
        for head in [stored.heads[trained_prompt_variant(stored, point)]["crops"]]
    }
    with torch.inference_mode():
        for number in range(2 * ROUNDS):
            for name in sorted(courses, reverse=bool(number % 2)):
                began = time.process_time()
                stored.transformer(images, courses[name])
                taken[name].append(time.process_time() - began)
    return statistics.median(taken[prompted.name]) / statistics.median(taken[merged.name])


def rules(stored: Checkpoint, most: int) -> tuple[Figures, list[Threshold]]:
    """The rule for strong merging against ToMe's, at the strongest, on what the transformer learned from."""
    first, other = merging(STRONG[-1]), merging(STRONG[-1], STRONG_RULE)
    found = gain(*(hits(stored, point, most)[train.PRETRAINING_TASK] for point in (first, other)))
    figures: Figures = {f"{other.name}: over ToMe's, 95 %": f"{100 * found['low']:.2f}–{100 * found['high']:.2f}"}
    return figures, [threshold(f"{other.name}: over ToMe's rule on crops, points", 100 * found["gain"], ">=", 2.0)]


def main() -> int:
    """Measure; 0 where every bar holds."""
    parser = argparse.ArgumentParser(prog="benchmarks.prompts", description=__doc__)
    parser.add_argument("--most", type=int, default=MAX_PER_TASK, help="held-out images of a task")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with Progress(console=console) as progress:
        figures, bars = won_back(load(FOLDER / train_finer_patches.WEIGHTS), given.most, progress)
        more_figures, more_bars = rules(load(FOLDER / train.WEIGHTS), given.most)
    outcome = ResultLine(name="bench-prompts", figures=figures | more_figures, bars=(*bars, *more_bars))
    for name, figure in outcome.figures.items():
        console.print(f"{name}: {figure:.4g}" if isinstance(figure, float) else f"{name}: {figure}", markup=False)
    for each in outcome.bars:
        console.print(f"{'holds' if each.holds else 'MISSED'}: {each.bar} {each.value:.4g} {each.bound}", markup=False)
    outcome.print()
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    sys.exit(main())
