"""Prompts and a head for one task are trained on a frozen transformer, on the course they will be served on.

So they learn to make up for what merging loses there (the papers know prompts without merging alone). Prompts begin
evenly between ±√(6 / (3·P² + d)), as VPT's do. What a head alone reads does not change while it learns, and is computed
once.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from trimtab_model_servers.transformer.image_preprocessing import Normalisation, preprocess
from trimtab_model_servers.transformer.tasks import Head
from trimtab_model_servers.transformer.transformer import ForwardPlan, VisionTransformer
from trimtab_training import optimizer

CHUNK = 64
"""Images computed at a time where nothing else bounds them."""
Advance = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class TrainingSchedule:
    """How long and how fast prompts learn; `smoothing` of the labels."""

    steps: int = 150
    batch: int = 48
    peak_rate: float = 1e-2
    seed: int = 21
    smoothing: float = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class Labelled:
    """Images of one task: pixels [n, channels, side, side], bytes or numbers in 0…1, and labels int64 [n]."""

    pixels: Tensor
    labels: Tensor


def fit_prompts(
    transformer: VisionTransformer,
    images: Labelled,
    normalisation: Normalisation,
    course: ForwardPlan,
    *,
    begun: Head,
    count: int,
    lesson: TrainingSchedule,
    advance: Advance = lambda _: None,
) -> Head:
    """Train so many prompts a layer, and the head on from where it begins.

    Args:
        transformer: frozen, in evaluation.
        images: to learn from.
        normalisation: of images.
        course: what the prompts are served with, merging and all.
        begun: the head that training begins with.
        count: prompts in each layer; 0 trains the head alone.
        lesson: how long.
        advance: told the loss of each step.
    """
    shape, random = transformer.shape, torch.Generator().manual_seed(lesson.seed)
    reach = (6.0 / (3 * shape.patch**2 + shape.width)) ** 0.5
    drawn = torch.rand(shape.depth, count, shape.width, generator=random)
    prompts = nn.Parameter((2 * drawn - 1) * reach, requires_grad=count > 0)
    weight, bias = nn.Parameter(begun.weight.clone()), nn.Parameter(begun.bias.clone())

    batches = torch.randint(len(images.labels), (lesson.steps, lesson.batch), generator=random)
    drawn, places = torch.unique(batches, return_inverse=True)
    fixed = None if count else features_of(transformer, images.pixels[drawn], normalisation, course)
    steps = iter(zip(batches, places, strict=True))

    def loss() -> Tensor:
        chosen, place = next(steps)
        if fixed is not None:
            features = fixed[place]
        else:
            shared = prompts.expand(lesson.batch, -1, -1, -1)
            features = transformer(preprocess(images.pixels[chosen], normalisation), replace(course, prompts=shared))
        return cross_entropy(linear(features, weight, bias), images.labels[chosen], label_smoothing=lesson.smoothing)

    groups = [{"params": [weight, bias], "weight_decay": 1e-4}]
    groups += [{"params": [prompts], "weight_decay": 0.0}] if count else []
    optimiser = torch.optim.AdamW(groups, lr=lesson.peak_rate)
    optimizer.train_epochs(optimiser, loss, peak_rate=lesson.peak_rate, steps=lesson.steps, advance=advance)
    return Head(weight.detach(), bias.detach(), prompts.detach() if count else None)


def features_of(
    transformer: VisionTransformer, pixels: Tensor, normalisation: Normalisation, course: ForwardPlan
) -> Tensor:
    """Run all images through a transformer on a course without prompts: float32 [n, d]."""
    with torch.inference_mode():
        chunks = [transformer(preprocess(part, normalisation), course) for part in torch.split(pixels, CHUNK)]
    return torch.cat(chunks).clone()


def scored(
    transformer: VisionTransformer, pixels: Tensor, normalisation: Normalisation, course: ForwardPlan, head: Head
) -> Tensor:
    """The logits of every image: float32 [n, classes]."""
    found = []
    with torch.inference_mode():
        for part in torch.split(pixels, CHUNK):
            shared = None if head.prompts is None else head.prompts.expand(len(part), -1, -1, -1)
            features = transformer(preprocess(part, normalisation), replace(course, prompts=shared))
            found.append(linear(features, head.weight, head.bias))
    return torch.cat(found).clone()
