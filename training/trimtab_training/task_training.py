"""Training of a new task of a vision transformer: a head, and prompts if any, for every prompt variant."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count as count_from

import torch
from torch import Tensor

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.transformer.checkpoints import Checkpoint
from trimtab_model_servers.transformer.config import Normalisation, ViTConfig
from trimtab_model_servers.transformer.tasks import Head, prompt_variants, require_trained
from trimtab_model_servers.transformer.transformer import ForwardPlan, VisionTransformer, forward_plan
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_training.prompt_tuning import LabelledImages, compute_logits, fit_prompts
from trimtab_training.trainer import Schedule


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """Forward plan and number of prompts per layer of one prompt variant."""

    plan: ForwardPlan
    prompts: int = 0


def trained_prompt_variant(checkpoint: Checkpoint, point: OperatingPoint) -> str:
    """The best prompt variant that a checkpoint has for a point; ModelError if it has none."""
    require_trained(point, checkpoint.heads)
    return next(variant for variant in prompt_variants(point) if variant in checkpoint.heads)


def task_logits(checkpoint: Checkpoint, point: OperatingPoint, task: str, pixels: Tensor) -> Tensor:
    """Logits of a task's images at a point: uint8 [n, channels, side, side] to float32 [n, classes]."""
    head = checkpoint.heads[trained_prompt_variant(checkpoint, point)][task]
    plan = forward_plan(point, checkpoint.transformer.shape.depth)
    return compute_logits(checkpoint.transformer, pixels, checkpoint.normalisation, plan, head)


def train_task(
    transformer: VisionTransformer,
    normalisation: Normalisation,
    images: LabelledImages,
    specs: Mapping[str, PromptSpec],
    schedule: Schedule,
    advance: Callable[[float], None] = lambda _: None,
) -> dict[str, Head]:
    """Train a task's heads by prompt variant; the transformer does not change.

    Args:
        transformer: frozen, in evaluation mode.
        normalisation: of images.
        images: training images, with labels from 0 without gaps.
        specs: by prompt variant.
        schedule: of each variant.
        advance: receives the finished share of the training.

    Raises:
        ModelError: images have another size, or labels do not match.
    """
    _require_matching(transformer.shape, images.pixels, images.labels)
    classes, step = int(images.labels.max()) + 1, count_from(1)
    initial = Head(torch.zeros(classes, transformer.shape.width), torch.zeros(classes))
    return {
        variant: fit_prompts(
            transformer,
            images,
            normalisation,
            spec.plan,
            initial=initial,
            count=spec.prompts,
            schedule=schedule,
            advance=lambda _: advance(next(step) / (schedule.steps * len(specs))),
        )
        for variant, spec in specs.items()
    }


def select_fitting(
    specs: Mapping[str, PromptSpec], classes: int, shape: ViTConfig, max_bytes: int
) -> dict[str, PromptSpec]:
    """The specs, in their order, whose float16 heads fit into a file; the first always."""
    selected: dict[str, PromptSpec] = {}
    total_bytes = 0
    for variant, spec in specs.items():
        head_bytes = 2 * (classes * (shape.width + 1) + spec.prompts * shape.depth * shape.width)
        if not selected or total_bytes + head_bytes <= max_bytes:
            selected[variant], total_bytes = spec, total_bytes + head_bytes
    return selected


def _require_matching(shape: ViTConfig, pixels: Tensor, labels: Tensor) -> None:
    expected = (shape.channels, shape.side, shape.side)
    if tuple(pixels.shape[1:]) != expected:
        raise ModelError(f"images have shape {[*pixels.shape[1:]]}; this transformer takes {[*expected]}")
    if len(labels) != len(pixels):
        raise ModelError(f"{len(pixels)} images have {len(labels)} labels; each needs one")
    counts = torch.bincount(labels) if len(labels) and int(labels.min()) >= 0 else torch.zeros(1)
    if len(counts) < 2 or int(counts.min()) < 1:
        raise ModelError("labels must be 0, 1, 2 and so on, at least two of them, each with an image")
