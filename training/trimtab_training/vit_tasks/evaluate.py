"""Evaluation of vision transformers on held-out images of each task, at each operating point."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trimtab_model_servers.transformer.checkpoints import Checkpoint
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_training.prompt_tuning import LabelledImages
from trimtab_training.task_training import task_logits
from trimtab_training.trainer import accuracy_entry
from trimtab_training.vit_tasks.operating_points import FULL, POINTS, Hits, gains

VARIANT = "vit-small"
ALL = "all"
Entry = dict[str, float]


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


def hits_of(scored: Mapping[str, ByTask]) -> dict[str, Hits]:
    """Correctness of each image, by point and task."""
    return {point: {task: images.correct for task, images in by_task.items()} for point, by_task in scored.items()}


def accuracy_report(
    hits: Mapping[str, Hits], variant: str = VARIANT, points: Sequence[OperatingPoint] = POINTS
) -> dict[str, Any]:
    """The content of `accuracy.json`."""
    full = np.concatenate(list(hits[FULL.name].values()))
    return {
        "split": "held-out by photo column, by digit image and by portrait; crops of one photo overlap",
        "interval": "Wilson, 95 %; of a gain, 95 % from the images on which two points differ",
        "variants": {variant: accuracy_entry(int(full.sum()), len(full))},
        "points": {point.name: _by_task(hits[point.name]) for point in points},
    } | ({"gains": gains(hits)} if points is POINTS else {})


def _by_task(hits: Hits) -> dict[str, Entry]:
    """Accuracies by task, and under ALL that of all images."""
    every = {**hits, ALL: np.concatenate(list(hits.values()))}
    return {task: accuracy_entry(int(correct.sum()), len(correct), key="value") for task, correct in every.items()}
