"""Evaluation of vision transformers on held-out images of each task, and the small transformer's operating points."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trimtab_model_servers.transformer.checkpoints import Checkpoint
from trimtab_pipelines.operating_point import OperatingPoint, TokenMerging
from trimtab_training.task_training import LabelledImages, task_logits
from trimtab_training.trainer import accuracy_entry
from trimtab_training.vit_tasks.datasets import MAX_PER_TASK, SEED, TASKS

VARIANT = "vit-small"
ALL = "all"
Entry = dict[str, float]
GUIDED: Final = (8, 10)
"""Merged tokens per layer of the points with the rule `guided`; 10 of 64 patches leave two."""


def merging(count: int, rule: str | None = None) -> OperatingPoint:
    """A point that merges `count` tokens in each layer, without an accuracy."""
    name = f"merge-{count}" + (f"-{rule}" if rule else "")
    return OperatingPoint(name=name, merging=TokenMerging(schedule=(count,), rule=rule), accuracy=0)


FULL: Final = OperatingPoint(name="full", accuracy=0)
POINTS: Final = (FULL, merging(4), merging(6), *(merging(count, "guided") for count in GUIDED))
"""Served points."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoredImages:
    """Logits of one task's images at one point, with labels."""

    logits: Tensor
    """float32 [n, classes]."""
    labels: Tensor
    """int64 [n]."""

    @property
    def correct(self) -> NDArray[np.bool_]:
        """Shape (n,)."""
        correct: NDArray[np.bool_] = (self.logits.argmax(dim=1) == self.labels).numpy()
        return correct


ByTask = Mapping[str, ScoredImages]


def held_out_images() -> dict[str, LabelledImages]:
    return {task: draw("held-out", MAX_PER_TASK, SEED) for task, draw in TASKS.items()}


def score_points(
    checkpoint: Checkpoint,
    points: Iterable[OperatingPoint],
    held_out: Mapping[str, LabelledImages],
    advance: Callable[[str], None],
) -> dict[str, ByTask]:
    """Score every task's images at every point, by point and task; `advance` receives each finished point."""
    scored: dict[str, ByTask] = {}
    for point in points:
        scored[point.name] = {
            task: ScoredImages(task_logits(checkpoint, point, task, images.pixels), images.labels)
            for task, images in held_out.items()
        }
        advance(point.name)
    return scored


def accuracy_report(
    scored: Mapping[str, ByTask], variant: str = VARIANT, points: Sequence[OperatingPoint] = POINTS
) -> dict[str, Any]:
    """The content of `accuracy.json`."""
    every = [images.correct for images in scored[FULL.name].values()]
    return {
        "split": "held-out by photo column, by digit image and by portrait; crops of one photo overlap",
        "interval": "Wilson, 95 %",
        "variants": {variant: _accuracy(every, "accuracy")},
        "points": {point.name: _accuracies(scored[point.name]) for point in points},
    }


def _accuracies(by_task: ByTask) -> dict[str, Entry]:
    """Accuracies by task, and under ALL that of all images."""
    every = [images.correct for images in by_task.values()]
    return {task: _accuracy([images.correct], "value") for task, images in by_task.items()} | {
        ALL: _accuracy(every, "value")
    }


def _accuracy(correct: Sequence[NDArray[np.bool_]], key: str) -> Entry:
    every = np.concatenate(correct)
    return accuracy_entry(int(every.sum()), every.size, key=key)
