"""A task joins those of a transformer: a head, and prompts where a point has some, for every way it is to run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count as count_from

import torch
from torch import Tensor

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.transformer.checkpoints import Checkpoint
from trimtab_model_servers.transformer.config import ViTConfig
from trimtab_model_servers.transformer.image_preprocessing import Normalisation
from trimtab_model_servers.transformer.prompt_selection import prompt_variants, require_trained
from trimtab_model_servers.transformer.tasks import Head
from trimtab_model_servers.transformer.transformer import ForwardPlan, VisionTransformer, course_of
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_training.prompt_tuning import Labelled, TrainingSchedule, fit_prompts, scored


@dataclass(frozen=True, slots=True)
class TrainedTask:
    """What a task learns for one way to run: the course it is served on, and prompts in each layer."""

    course: ForwardPlan
    prompts: int = 0


def way_of(stored: Checkpoint, point: OperatingPoint) -> str:
    """The way a point runs with what is stored; ModelError, which names the point, where nobody trained one for it."""
    require_trained(point, stored.heads)
    return next(way for way in prompt_variants(point) if way in stored.heads)


def answers_of(stored: Checkpoint, point: OperatingPoint, task: str, images: Labelled) -> Tensor:
    """The labels that a task's images get at a point: int64 [n]."""
    return logits_of(stored, point, task, images.pixels).argmax(dim=1)


def logits_of(stored: Checkpoint, point: OperatingPoint, task: str, pixels: Tensor) -> Tensor:
    """The logits that a task's images get at a point: uint8 [n, channels, side, side] to float32 [n, classes]."""
    head, course = stored.heads[way_of(stored, point)][task], course_of(point, stored.transformer.shape.depth)
    return scored(stored.transformer, pixels, stored.normalisation, course, head)


def train_task(
    transformer: VisionTransformer,
    normalisation: Normalisation,
    images: Labelled,
    taught: Mapping[str, TrainedTask],
    lesson: TrainingSchedule,
    advance: Callable[[float], None] = lambda _: None,
) -> dict[str, Head]:
    """Train a task's heads, by way to run; the transformer stays as it is.

    Args:
        transformer: frozen, in evaluation.
        normalisation: of images.
        images: to learn from; labels from 0 on without gaps.
        taught: by way to run.
        lesson: how long and how fast, for each way.
        advance: told which share of the training is done.

    Raises:
        ModelError: images are of another size, or labels do not suit them.
    """
    _require(transformer.shape, images.pixels, images.labels)
    classes, done = int(images.labels.max()) + 1, count_from(1)
    begun = Head(torch.zeros(classes, transformer.shape.width), torch.zeros(classes))
    return {
        way: fit_prompts(
            transformer,
            images,
            normalisation,
            each.course,
            begun=begun,
            count=each.prompts,
            lesson=lesson,
            advance=lambda _: advance(next(done) / (lesson.steps * len(taught))),
        )
        for way, each in taught.items()
    }


def fitting(
    taught: Mapping[str, TrainedTask], classes: int, shape: ViTConfig, most_bytes: int
) -> dict[str, TrainedTask]:
    """Those whose heads of so many classes find room in a file in float16, in their order; the first always."""
    kept: dict[str, TrainedTask] = {}
    total_bytes = 0
    for way, each in taught.items():
        head_bytes = 2 * (classes * (shape.width + 1) + each.prompts * shape.depth * shape.width)
        if not kept or total_bytes + head_bytes <= most_bytes:
            kept[way], total_bytes = each, total_bytes + head_bytes
    return kept


def _require(shape: ViTConfig, pixels: Tensor, labels: Tensor) -> None:
    wanted = (shape.channels, shape.side, shape.side)
    if tuple(pixels.shape[1:]) != wanted:
        raise ModelError(f"images are {[*pixels.shape[1:]]}; this transformer takes {[*wanted]}")
    if len(labels) != len(pixels):
        raise ModelError(f"{len(pixels)} images have {len(labels)} labels; give one each")
    counts = torch.bincount(labels) if len(labels) and int(labels.min()) >= 0 else torch.zeros(1)
    if len(counts) < 2 or int(counts.min()) < 1:
        raise ModelError("labels must be 0, 1, 2 and so on, at least two of them, each with an image")
