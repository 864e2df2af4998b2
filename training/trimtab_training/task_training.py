"""Training of a task of a frozen vision transformer: a head, and prompts if any, for every prompt variant.

Training with the plan's token merging compensates for what merging loses; the papers train prompts without it. Prompts
are initialised uniformly within ±√(6 / (3·P² + d)), as in VPT. Without prompts, features are computed once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count as count_from
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.transformer.checkpoints import Checkpoint
from trimtab_model_servers.transformer.config import Normalisation, ViTConfig, preprocess
from trimtab_model_servers.transformer.tasks import Head, prompt_variants, require_trained
from trimtab_model_servers.transformer.transformer import ForwardPlan, VisionTransformer, forward_plan
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_training.trainer import Advance, Schedule, minimize

CHUNK: Final = 64
"""Images per forward pass without gradients."""
LABEL_SMOOTHING: Final = 0.05


def task_schedule(steps: int = 150, seed: int = 21) -> Schedule:
    return Schedule(steps=steps, batch=48, peak_rate=1e-2, seed=seed)


@dataclass(frozen=True, slots=True, eq=False)
class LabelledImages:
    """Images of one task with their labels."""

    pixels: Tensor
    """[n, channels, side, side], uint8 or 0…1."""
    labels: Tensor
    """int64 [n]."""

    def __len__(self) -> int:
        return len(self.labels)


def fit_prompts(
    transformer: VisionTransformer,
    images: LabelledImages,
    normalisation: Normalisation,
    plan: ForwardPlan,
    *,
    initial: Head,
    count: int,
    schedule: Schedule,
    advance: Advance = lambda _: None,
) -> Head:
    """Train `count` prompts per layer for a plan, and the head from its initial weights; 0 trains the head alone.

    The transformer is frozen, in evaluation mode.
    """
    shape, random = transformer.shape, torch.Generator().manual_seed(schedule.seed)
    bound = (6.0 / (3 * shape.patch**2 + shape.width)) ** 0.5
    uniform = torch.rand(shape.depth, count, shape.width, generator=random)
    prompts = nn.Parameter((2 * uniform - 1) * bound, requires_grad=count > 0)
    weight, bias = nn.Parameter(initial.weight.clone()), nn.Parameter(initial.bias.clone())

    batches = torch.randint(len(images.labels), (schedule.steps, schedule.batch), generator=random)
    used, positions = torch.unique(batches, return_inverse=True)
    fixed = None if count else compute_features(transformer, images.pixels[used], normalisation, plan)
    steps = iter(zip(batches, positions, strict=True))

    def loss() -> Tensor:
        indices, position = next(steps)
        if fixed is not None:
            features = fixed[position]
        else:
            shared = prompts.expand(schedule.batch, -1, -1, -1)
            features = transformer(preprocess(images.pixels[indices], normalisation), replace(plan, prompts=shared))
        return cross_entropy(linear(features, weight, bias), images.labels[indices], label_smoothing=LABEL_SMOOTHING)

    groups = [{"params": [weight, bias], "weight_decay": 1e-4}]
    groups += [{"params": [prompts], "weight_decay": 0.0}] if count else []
    minimize(groups, loss, schedule, advance=advance)
    return Head(weight.detach(), bias.detach(), prompts.detach() if count else None)


def compute_features(
    transformer: VisionTransformer,
    pixels: Tensor,
    normalisation: Normalisation,
    plan: ForwardPlan,
    prompts: Tensor | None = None,
) -> Tensor:
    """Features of all images with a plan: float32 [n, d]."""
    features = []
    with torch.inference_mode():
        for part in torch.split(pixels, CHUNK):
            shared = None if prompts is None else prompts.expand(len(part), -1, -1, -1)
            features.append(transformer(preprocess(part, normalisation), replace(plan, prompts=shared)))
    return torch.cat(features).clone()


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
    features = compute_features(checkpoint.transformer, pixels, checkpoint.normalisation, plan, head.prompts)
    return linear(features, head.weight, head.bias)


def train_task(
    transformer: VisionTransformer,
    normalisation: Normalisation,
    images: LabelledImages,
    specs: Mapping[str, PromptSpec],
    schedule: Schedule,
    advance: Callable[[float], None] = lambda _: None,
) -> dict[str, Head]:
    """Train a task's heads, on images with labels from 0 without gaps, by prompt variant; the transformer is frozen.

    `advance` receives the finished share. Raises ModelError if images have another size, or labels do not match.
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
