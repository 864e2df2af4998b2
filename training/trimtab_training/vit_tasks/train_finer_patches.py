"""Training of the transformer with finer patches: `python -m trimtab_training.vit_tasks.train_finer_patches -o DIR`.

Its patches have 2 pixels a side instead of 4, so that 256 tokens make merging worthwhile. It starts from the resized
weights of the small transformer, is trained further on crops, and gets a head for every other task. Writes
`DIR/weights/vit-fine.safetensors`. `trimtab evaluate` measures its points and escalations.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from rich.progress import Progress
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from trimtab_model_servers.transformer.checkpoints import Checkpoint, load, save, store_temperatures
from trimtab_model_servers.transformer.tasks import PLAIN, prompt_variant
from trimtab_model_servers.transformer.transformer import VisionTransformer, forward_plan
from trimtab_pipelines.operating_point import TokenPrompts
from trimtab_training.task_training import fit_prompts
from trimtab_training.trainer import Advance, Schedule, argument_parser, loss_bar, training_progress
from trimtab_training.vit_tasks import train
from trimtab_training.vit_tasks.datasets import TASKS
from trimtab_training.vit_tasks.points import FULL, fit_temperatures, merging
from trimtab_training.vit_tasks.train import fit_transformer

VARIANT: Final = "vit-fine"
WEIGHTS: Final = "weights/vit-fine.safetensors"
PATCH_PX: Final = 2
TRAINING: Final = Schedule(steps=350, batch=48, peak_rate=1e-3, seed=11)
PROMPTS: Final = 1
"""Prompts per layer."""
PROMPTED: Final = tuple(
    point.replace(name=f"{point.name}-prompts", prompts=TokenPrompts(count=PROMPTS, mode="Replace"))
    for point in (merging(40), merging(48))
)
"""Strongest merging: 48 of 256 patches a layer leave few after the fifth. Prompts and heads are trained with it."""
POINTS: Final = (FULL, *(merging(count) for count in (16, 24, 32)), *PROMPTED)
"""Served points."""
PROMPT_SCHEDULE: Final = Schedule(steps=300, batch=48, peak_rate=8e-3, seed=21)


def halve_patches(checkpoint: Checkpoint, patch: int = PATCH_PX) -> VisionTransformer:
    """The same transformer with smaller patches: patch weights are summed, position embeddings interpolated."""
    small = checkpoint.transformer
    shape = small.shape.replace(patch=patch)
    factor, weights = small.shape.patch // patch, small.state_dict()
    side = small.shape.side // small.shape.patch
    leading, positions = weights["pos_embed"][:, : small.shape.leading], weights["pos_embed"][:, small.shape.leading :]
    grid = positions.view(1, side, side, shape.width).permute(0, 3, 1, 2)
    finer = interpolate(grid, scale_factor=factor, mode="bicubic", align_corners=False)
    changed: dict[str, Tensor] = {
        "patch_embed.proj.weight": avg_pool2d(weights["patch_embed.proj.weight"], factor) * factor**2,
        "pos_embed": torch.cat([leading, finer.flatten(2).transpose(1, 2)], dim=1),
    }
    transformer = VisionTransformer(shape)
    transformer.load_state_dict({**weights, **changed})
    return transformer


def train_transformer(small: Checkpoint, schedule: Schedule, advance: Advance) -> Checkpoint:
    """Train the finer transformer further on crops; the checkpoint has their head only."""
    transformer, task = halve_patches(small), train.PRETRAINING_TASK
    initial = small.heads[PLAIN][task]
    images = train.training_images(task)
    head = fit_transformer(transformer, images, len(initial.bias), schedule, advance, initial)
    frozen = transformer.eval().requires_grad_(requires_grad=False)
    return Checkpoint(frozen, {PLAIN: {task: head}}, {}, "Image")


def add_prompts(checkpoint: Checkpoint, advance: Callable[[str], None]) -> Checkpoint:
    """Train prompts for every task at the prompted points, and heads from the plain ones."""
    heads = dict(checkpoint.heads)
    for point in PROMPTED:
        plan = forward_plan(point, checkpoint.transformer.shape.depth)
        heads[prompt_variant(point)] = by_task = {}
        for task, initial in checkpoint.heads[PLAIN].items():
            by_task[task] = fit_prompts(
                checkpoint.transformer,
                train.training_images(task),
                checkpoint.normalisation,
                plan,
                initial=initial,
                count=PROMPTS,
                schedule=PROMPT_SCHEDULE,
            )
            advance(f"{point.name} {task}")
    return replace(checkpoint, heads=heads)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the chosen steps, then calibrate."""
    parser = argument_parser("Train the vision transformer with finer patches.", ("prompts", "calibration"))
    options = parser.parse_args(arguments)
    path = options.output / WEIGHTS
    with training_progress(options.threads) as progress:
        if not options.only:
            _train(options.output, progress)
        if options.only != ["calibration"]:
            advance = train.note_bar(progress, "prompts", len(PROMPTED) * len(TASKS))
            save(add_prompts(load(path), advance), path, {"seed": str(TRAINING.seed)})
        advance = train.note_bar(progress, "temperatures", len(POINTS))
        store_temperatures(path, fit_temperatures(load(path), POINTS, advance))
    return 0


def _train(output: Path, progress: Progress) -> None:
    small = load(output / train.WEIGHTS)
    finer = train_transformer(small, TRAINING, loss_bar(progress, "transformer", TRAINING.steps))
    head = finer.heads[PLAIN][train.PRETRAINING_TASK]
    checkpoint = train.add_heads(finer.transformer, head, train.note_bar(progress, "plain heads", len(TASKS)))
    save(checkpoint, output / WEIGHTS, {"seed": str(TRAINING.seed)})


if __name__ == "__main__":
    sys.exit(main())
