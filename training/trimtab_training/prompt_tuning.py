"""Training of prompts and a head for one task on a frozen vision transformer, with the forward plan that serves them.

Training with the plan's token merging compensates for what merging loses; the papers train prompts without it. Prompts
are initialised uniformly within ±√(6 / (3·P² + d)), as in VPT. Without prompts, features are computed once.
"""

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from trimtab_model_servers.transformer.config import Normalisation, preprocess
from trimtab_model_servers.transformer.tasks import Head
from trimtab_model_servers.transformer.transformer import ForwardPlan, VisionTransformer
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
    """Train `count` prompts per layer, and the head from its initial weights; 0 trains the head alone.

    Args:
        transformer: frozen, in evaluation mode.
        images: training images.
        normalisation: of images.
        plan: forward plan that serves the prompts, including its merging.
        initial: head to start from.
        count: prompts in each layer.
        schedule: training schedule.
        advance: receives the loss of each step.
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
    transformer: VisionTransformer, pixels: Tensor, normalisation: Normalisation, plan: ForwardPlan
) -> Tensor:
    """Features of all images with a plan without prompts: float32 [n, d]."""
    with torch.inference_mode():
        chunks = [transformer(preprocess(part, normalisation), plan) for part in torch.split(pixels, CHUNK)]
    return torch.cat(chunks).clone()


def compute_logits(
    transformer: VisionTransformer, pixels: Tensor, normalisation: Normalisation, plan: ForwardPlan, head: Head
) -> Tensor:
    """Logits of all images: float32 [n, classes]."""
    logits = []
    with torch.inference_mode():
        for part in torch.split(pixels, CHUNK):
            shared = None if head.prompts is None else head.prompts.expand(len(part), -1, -1, -1)
            features = transformer(preprocess(part, normalisation), replace(plan, prompts=shared))
            logits.append(linear(features, head.weight, head.bias))
    return torch.cat(logits).clone()
