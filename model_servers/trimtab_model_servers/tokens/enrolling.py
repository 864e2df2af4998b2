"""A task joins those of a transformer: a head, and prompts where others have some, for every way it runs."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count as count_from

import torch
from torch import Tensor

from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.tokens.prompting import Labelled, Lesson, fit_prompts, scored
from trimtab_model_servers.tokens.rules import RULES
from trimtab_model_servers.tokens.schedule import in_each_layer
from trimtab_model_servers.tokens.stored import Stored
from trimtab_model_servers.tokens.tasks import Head
from trimtab_model_servers.tokens.transformer import Course
from trimtab_model_servers.tokens.ways import PLAIN, ways
from trimtab_pipelines.operating_point import OperatingPoint


def course_of(point: OperatingPoint, depth: int) -> Course:
    """The course of a point, prompts aside."""
    merging = point.merging
    rule = RULES[merging.rule if merging and merging.rule else next(iter(RULES))]
    merged = in_each_layer(merging.schedule if merging else (), depth)
    return Course(merged, rule, accumulate=point.prompts is not None and point.prompts.mode == "Accumulate")


def way_of(stored: Stored, point: OperatingPoint) -> str:
    """The way a point runs with what is stored; KeyError where nobody trained one for it."""
    return next(way for way in ways(point) if way in stored.heads)


def right_of(stored: Stored, point: OperatingPoint, task: str, images: Labelled) -> int:
    """How many images of a task are answered rightly at a point."""
    return int((answers_of(stored, point, task, images) == images.labels).sum())


def answers_of(stored: Stored, point: OperatingPoint, task: str, images: Labelled) -> Tensor:
    """The labels that a task's images get at a point: int64 [n]."""
    return logits_of(stored, point, task, images.pixels).argmax(dim=1)


def logits_of(stored: Stored, point: OperatingPoint, task: str, pixels: Tensor) -> Tensor:
    """The logits that a task's images get at a point: uint8 [n, channels, side, side] to float32 [n, classes]."""
    head, course = stored.heads[way_of(stored, point)][task], course_of(point, stored.transformer.shape.depth)
    return scored(stored.transformer, pixels, stored.normalisation, course, head)


def enrolled(
    stored: Stored,
    task: str,
    images: Labelled,
    points: tuple[OperatingPoint, ...],
    lesson: Lesson,
    advance: Callable[[float], None] = lambda _: None,
) -> Stored:
    """Train a task for every way that points run; the transformer and the other tasks stay as they are.

    Args:
        stored: the transformer with its tasks.
        task: the new one's name.
        images: to learn from; labels from 0 on without gaps.
        points: the operating points served; ways that none of them runs are left out.
        lesson: how long and how fast.
        advance: told which share of the training is done.

    Raises:
        ModelError: there is such a task already, images are of another size, or labels do not suit them.
    """
    _require(stored, task, images.pixels, images.labels)
    classes, shape = int(images.labels.max()) + 1, stored.transformer.shape
    used = {PLAIN, *(way_of(stored, point) for point in points)}
    heads = {way: dict(by_task) for way, by_task in stored.heads.items() if way in used}
    begun = Head(torch.zeros(classes, shape.width), torch.zeros(classes))
    done = count_from(1)
    for way, by_task in heads.items():
        prompts = next(iter(by_task.values())).prompts
        served = [point for point in points if way == way_of(stored, point)]
        course = course_of(served[0], shape.depth) if served and way != PLAIN else Course()
        count = 0 if prompts is None else prompts.shape[1]
        by_task[task] = fit_prompts(
            stored.transformer,
            images,
            stored.normalisation,
            course,
            begun=begun,
            count=count,
            lesson=lesson,
            advance=lambda _: advance(next(done) / (lesson.steps * len(heads))),
        )
    names = tuple(str(label) for label in range(classes))
    return replace(stored, heads=heads, tasks={**stored.tasks, task: names})


def _require(stored: Stored, task: str, pixels: Tensor, labels: Tensor) -> None:
    shape = stored.transformer.shape
    wanted = (shape.channels, shape.side, shape.side)
    if task in stored.tasks:
        raise ModelError(f"there is a task {task!r} already; the weights have: {', '.join(stored.tasks)}")
    if tuple(pixels.shape[1:]) != wanted:
        raise ModelError(f"images are {[*pixels.shape[1:]]}; this transformer takes {[*wanted]}")
    if len(labels) != len(pixels):
        raise ModelError(f"{len(pixels)} images have {len(labels)} labels; give one each")
    counts = torch.bincount(labels) if len(labels) and int(labels.min()) >= 0 else torch.zeros(1)
    if len(counts) < 2 or int(counts.min()) < 1:
        raise ModelError("labels must be 0, 1, 2 and so on, at least two of them, each with an image")
