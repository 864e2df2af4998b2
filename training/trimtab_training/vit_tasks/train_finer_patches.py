"""Training of the transformer with finer patches: `python -m trimtab_training.vit_tasks.train_finer_patches -o DIR`.

Its patches have 2 pixels a side instead of 4, so that 256 tokens make merging worthwhile. It starts from the resized
weights of the small transformer, is trained further on crops, and gets a head for every other task. Writes
`DIR/weights/vit-fine.safetensors`, `DIR/accuracy-fine.json`, and escalations into `DIR/pipeline.yaml`.
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
from trimtab_model_servers.transformer.tasks import PLAIN, Head, prompt_variant
from trimtab_model_servers.transformer.transformer import ForwardPlan, VisionTransformer, forward_plan
from trimtab_pipelines.operating_point import OperatingPoint, TokenPrompts
from trimtab_training.task_training import fit_prompts
from trimtab_training.trainer import Advance, Schedule, argument_parser, loss_bar, training_progress, write_report
from trimtab_training.vit_tasks import calibration, evaluate, train
from trimtab_training.vit_tasks.datasets import CLASSES, TASKS
from trimtab_training.vit_tasks.evaluate import FULL, gains, merging
from trimtab_training.vit_tasks.train import fit_head, fit_transformer

VARIANT: Final = "vit-fine"
WEIGHTS: Final = "weights/vit-fine.safetensors"
ACCURACY: Final = "accuracy-fine.json"
PATCH_PX: Final = 2
TRAINING: Final = Schedule(steps=350, batch=48, peak_rate=1e-3, seed=11)
STRONGEST: Final = tuple(merging(count) for count in (40, 48))
"""Strongest merging: 48 of 256 patches a layer leave few after the fifth. Heads are trained with the merging."""
PROMPTED: Final = tuple(
    point.model_copy(update={"name": f"{point.name}-prompts", "prompts": TokenPrompts(count=1, mode="Replace")})
    for point in STRONGEST
)
"""Strongest merging with one prompt per layer."""
POINTS: Final = (FULL, *(merging(count) for count in (16, 24, 32)), *PROMPTED)
"""Served points."""
PROMPT_SCHEDULE: Final = Schedule(steps=300, batch=48, peak_rate=8e-3, seed=21)
MAX_IMAGES: Final = 12_000
"""Training images per task for heads with merging."""


def halve_patches(checkpoint: Checkpoint, patch: int = PATCH_PX) -> VisionTransformer:
    """The same transformer with smaller patches: patch weights are summed, position embeddings interpolated."""
    small = checkpoint.transformer
    shape = small.shape.model_copy(update={"patch": patch})
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


def add_merging_heads(checkpoint: Checkpoint, advance: Callable[[str], None]) -> Checkpoint:
    """Train a head for every task at the strongest points, with their merging."""

    def fit(point: OperatingPoint, plan: ForwardPlan, task: str) -> Head:
        images = train.training_images(task, MAX_IMAGES)
        head = fit_head(checkpoint.transformer, images, len(CLASSES[task]), train.HEADS, plan)
        advance(f"{point.name} {task}")
        return head

    return _add_heads(checkpoint, STRONGEST, fit)


def add_prompts(checkpoint: Checkpoint, advance: Callable[[str], None]) -> Checkpoint:
    """Train prompts for every task at the prompted points, and heads from the plain ones."""

    def fit(point: OperatingPoint, plan: ForwardPlan, task: str) -> Head:
        head = fit_prompts(
            checkpoint.transformer,
            train.training_images(task),
            checkpoint.normalisation,
            plan,
            initial=checkpoint.heads[PLAIN][task],
            count=point.prompts.count if point.prompts else 0,
            schedule=PROMPT_SCHEDULE,
        )
        advance(f"{point.name} {task}")
        return head

    return _add_heads(checkpoint, PROMPTED, fit)


def _add_heads(
    checkpoint: Checkpoint, points: Sequence[OperatingPoint], fit: Callable[[OperatingPoint, ForwardPlan, str], Head]
) -> Checkpoint:
    heads = dict(checkpoint.heads)
    for point in points:
        plan = forward_plan(point, checkpoint.transformer.shape.depth)
        heads[prompt_variant(point)] = {task: fit(point, plan, task) for task in checkpoint.heads[PLAIN]}
    return replace(checkpoint, heads=heads)


def plain(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its plain heads only, which were trained without merging."""
    return replace(checkpoint, heads={PLAIN: checkpoint.heads[PLAIN]})


def measure(
    checkpoint: Checkpoint, advance: Callable[[str], None]
) -> tuple[dict[str, object], calibration.Temperatures, calibration.Escalations]:
    """Report, temperatures and escalations of the served points, compared with plain heads at the strongest."""
    held_out = evaluate.held_out_images()
    bare = tuple(point.model_copy(update={"name": f"{point.name}-plain-head"}) for point in STRONGEST)
    scored = evaluate.score_points(checkpoint, (*POINTS, *STRONGEST), held_out, advance)
    scored |= evaluate.score_points(plain(checkpoint), bare, held_out, advance)
    hits = evaluate.hits_of(scored)
    pairs = [*zip(bare, STRONGEST, strict=True), *zip(bare, PROMPTED, strict=True)]
    report = evaluate.accuracy_report(hits, VARIANT, (*POINTS, *STRONGEST, *bare)) | {"gains": gains(hits, pairs)}
    report |= {"confidence": calibration.confidence_report(scored, POINTS)}
    return report, calibration.fit_temperatures(scored, POINTS), calibration.escalations(scored, POINTS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train the chosen steps, then measure."""
    parser = argument_parser("Train and measure the vision transformer with finer patches.")
    parser.add_argument("--only", choices=["heads", "prompts", "measure"], help="keep the existing transformer")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    path = options.output / WEIGHTS
    with training_progress() as progress:
        if options.only is None:
            _train(options.output, progress)
        for name, step in (("heads", add_merging_heads), ("prompts", add_prompts)):
            if options.only in {None, name}:
                checkpoint = step(load(path), train.note_bar(progress, name, len(STRONGEST) * len(TASKS)))
                save(checkpoint, path, {"seed": str(TRAINING.seed)})
        advance = train.note_bar(progress, "measure", len(POINTS) + 2 * len(STRONGEST))
        report, temperatures, escalations = measure(load(path), advance)
    write_report(options.output / ACCURACY, report)
    store_temperatures(path, temperatures)
    calibration.write_escalations(options.output / "pipeline.yaml", VARIANT, escalations)
    return 0


def _train(output: Path, progress: Progress) -> None:
    small = load(output / train.WEIGHTS)
    finer = train_transformer(small, TRAINING, loss_bar(progress, "transformer", TRAINING.steps))
    head = finer.heads[PLAIN][train.PRETRAINING_TASK]
    checkpoint = train.add_heads(finer.transformer, head, train.note_bar(progress, "plain heads", len(TASKS)))
    save(checkpoint, output / WEIGHTS, {"seed": str(TRAINING.seed)})


if __name__ == "__main__":
    sys.exit(main())
