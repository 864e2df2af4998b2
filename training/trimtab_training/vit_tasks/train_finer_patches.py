"""Training of the small transformer with finer patches.

Usage: ``python -m trimtab_training.vit_tasks.train_finer_patches -o DIR``

Its patches have 2 pixels a side instead of 4, so that it has 256 of them: enough that merging them saves time. It
begins with what the small one has learned, resized, and learns on from the crops; then every other task gets a head.

Writes ``DIR/weights/vit-fine.safetensors`` and ``DIR/accuracy-fine.json``, and the second looks of its
points into ``DIR/pipeline.yaml``.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from trimtab_model_servers.transformer.checkpoints import Checkpoint, load, save, store_temperatures
from trimtab_model_servers.transformer.prompt_selection import PLAIN, prompt_variant
from trimtab_model_servers.transformer.transformer import VisionTransformer, course_of
from trimtab_pipelines.operating_point import TokenPrompts
from trimtab_training.prompt_tuning import Labelled, TrainingSchedule, fit_prompts
from trimtab_training.vit_tasks import calibration, evaluate, train
from trimtab_training.vit_tasks.datasets import CLASSES, TASKS, Images
from trimtab_training.vit_tasks.labelled_samples import MOST, SEED
from trimtab_training.vit_tasks.operating_points import FULL, gains, merging
from trimtab_training.vit_tasks.train_loops import Training, fit_head, fit_transformer

VARIANT: Final = "vit-fine"
WEIGHTS: Final = "weights/vit-fine.safetensors"
ACCURACY: Final = "accuracy-fine.json"
PATCH_PX: Final = 2
TRAINING: Final = Training(steps=350, batch=48, peak_rate=1e-3, seed=11)
STRONGEST: Final = tuple(merging(count) for count in (40, 48))
"""Of 256 patches 48 a layer leave a handful after the fifth. Their heads are trained while so much is merged."""
PROMPTED: Final = tuple(
    point.model_copy(update={"name": f"{point.name}-prompts", "prompts": TokenPrompts(count=1, mode="Replace")})
    for point in STRONGEST
)
"""The strongest with a prompt a layer, trained as the heads are."""
POINTS: Final = (FULL, *(merging(count) for count in (16, 24, 32)), *PROMPTED)
"""Served."""
LESSON: Final = TrainingSchedule(steps=300, batch=48, peak_rate=8e-3, seed=21)
MOST_IMAGES: Final = 12_000
"""Of a task, to train the heads of the strongest with."""


def halve_patches(stored: Checkpoint, patch: int = PATCH_PX) -> VisionTransformer:
    """The same transformer with patches half as wide: what it learned of a patch is summed, of a place interpolated."""
    small = stored.transformer
    shape = small.shape.model_copy(update={"patch": patch})
    times, old = small.shape.patch // patch, small.state_dict()
    side = small.shape.side // small.shape.patch
    leading, places = old["pos_embed"][:, : small.shape.leading], old["pos_embed"][:, small.shape.leading :]
    grid = places.view(1, side, side, shape.width).permute(0, 3, 1, 2)
    finer = interpolate(grid, scale_factor=times, mode="bicubic", align_corners=False)
    changed: dict[str, Tensor] = {
        "patch_embed.proj.weight": avg_pool2d(old["patch_embed.proj.weight"], times) * times**2,
        "pos_embed": torch.cat([leading, finer.flatten(2).transpose(1, 2)], dim=1),
    }
    transformer = VisionTransformer(shape)
    transformer.load_state_dict({**old, **changed})
    return transformer


def trained(begun: Checkpoint, training: Training, advance: Callable[[float], None]) -> Checkpoint:
    """The finer transformer, learned on from the crops; it has their head alone."""
    transformer = halve_patches(begun)
    images, head = _images(train.LEARNED_FROM), begun.heads[PLAIN][train.LEARNED_FROM]
    head = fit_transformer(transformer, images, len(head.bias), training, advance, head)
    frozen = transformer.eval().requires_grad_(requires_grad=False)
    return Checkpoint(frozen, {PLAIN: {train.LEARNED_FROM: head}}, {}, "Image")


def with_heads(stored: Checkpoint) -> Checkpoint:
    """Every other task gets a head on what the transformer has learned."""
    known = stored.heads[PLAIN][train.LEARNED_FROM]
    heads = {
        task: known
        if task == train.LEARNED_FROM
        else fit_head(stored.transformer, _images(task), len(CLASSES[task]), train.HEADS)
        for task in TASKS
    }
    return Checkpoint(stored.transformer, {PLAIN: heads}, CLASSES, "Image")


def with_heads_for_merging(stored: Checkpoint, tell: Callable[[str], None]) -> Checkpoint:
    """At the strongest points every task gets a head that is trained while so much is merged."""
    heads = dict(stored.heads)
    for point in STRONGEST:
        course, own = course_of(point, stored.transformer.shape.depth), {}
        for task, classes in CLASSES.items():
            own[task] = fit_head(stored.transformer, _images(task, MOST_IMAGES), len(classes), train.HEADS, course)
            tell(f"{point.name} {task}")
        heads[prompt_variant(point)] = own
    return replace(stored, heads=heads)


def with_prompts(stored: Checkpoint, tell: Callable[[str], None]) -> Checkpoint:
    """Every task gets prompts, and a head that goes on from the plain one, for each point that has some."""
    heads = dict(stored.heads)
    for point in PROMPTED:
        count = point.prompts.count if point.prompts else 0
        course, own = course_of(point, stored.transformer.shape.depth), {}
        for task, begun in stored.heads[PLAIN].items():
            drawn = _images(task)
            images = Labelled(drawn.pixels, drawn.labels)
            own[task] = fit_prompts(
                stored.transformer, images, stored.normalisation, course, begun=begun, count=count, lesson=LESSON
            )
            tell(f"{point.name} {task}")
        heads[prompt_variant(point)] = own
    return replace(stored, heads=heads)


def plain(stored: Checkpoint) -> Checkpoint:
    """It with the heads alone that were trained without merging, for every way."""
    return replace(stored, heads={PLAIN: stored.heads[PLAIN]})


def measured(
    stored: Checkpoint, tell: Callable[[str], None]
) -> tuple[dict[str, object], calibration.Temperatures, calibration.Looks]:
    """Measure every served point on images that nothing was trained on, and what the strongest are held against."""
    held_out = {task: draw("held-out", MOST, SEED) for task, draw in TASKS.items()}
    bare = tuple(point.model_copy(update={"name": f"{point.name}-plain-head"}) for point in STRONGEST)
    scored = evaluate.at_points(stored, (*POINTS, *STRONGEST), held_out, tell)
    scored |= evaluate.at_points(plain(stored), bare, held_out, tell)
    hits = evaluate.hits_of(scored)
    pairs = [*zip(bare, STRONGEST, strict=True), *zip(bare, PROMPTED, strict=True)]
    found = evaluate.report(hits, VARIANT, (*POINTS, *STRONGEST, *bare)) | {"gains": gains(hits, pairs)}
    found |= {"confidence": calibration.mean_confidence(scored, POINTS)}
    return found, calibration.temperatures(scored, POINTS), calibration.escalations(scored, POINTS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, write, measure, write."""
    parser = argparse.ArgumentParser(description="Train the finer twin of the small vision transformer.")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", choices=["heads", "prompts", "measure"], help="on the transformer that is there")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    path = options.output / WEIGHTS
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True)) as progress:
        if options.only is None:
            _train(options.output, progress)
        for name, step in (("heads", with_heads_for_merging), ("prompts", with_prompts)):
            if options.only in {None, name}:
                bar = progress.add_task(name, total=len(STRONGEST) * len(TASKS), note="")
                made = step(load(path), partial(_note, progress, bar))
                save(made, path, {"seed": str(TRAINING.seed)})
        bar = progress.add_task("measure", total=len(POINTS) + 2 * len(STRONGEST), note="")
        found, fitted, looks = measured(load(path), partial(_note, progress, bar))
    (options.output / ACCURACY).write_text(json.dumps(found, indent=2) + "\n")
    store_temperatures(path, fitted)
    calibration.write_escalations(options.output / "pipeline.yaml", VARIANT, looks)
    return 0


def _note(progress: Progress, bar: TaskID, name: str) -> None:
    progress.update(bar, advance=1, note=name)


def _train(output: Path, progress: Progress) -> None:
    bar = progress.add_task("transformer", total=TRAINING.steps, note="")
    stored = trained(
        load(output / train.WEIGHTS), TRAINING, lambda one: progress.update(bar, advance=1, note=f"{one:.3f}")
    )
    save(with_heads(stored), output / WEIGHTS, {"seed": str(TRAINING.seed)})


def _images(task: str, most: int | None = None) -> Images:
    count = train.TRAINING_IMAGES[task]
    return TASKS[task]("train", min(count, most or count), train.TRAINING_SEED)


if __name__ == "__main__":
    sys.exit(main())
