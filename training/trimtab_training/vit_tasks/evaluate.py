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
STRONG_RULE: Final = "guided"
STRONG: Final = (8, 10)
"""Merged tokens per layer of the points with STRONG_RULE; 10 of 64 patches leave two."""
Hits = Mapping[str, NDArray[np.bool_]]
"""Correctness of each held-out image, by task."""


def merging(count: int, rule: str | None = None) -> OperatingPoint:
    """A point that merges `count` tokens in each layer, without an accuracy."""
    name = f"merge-{count}" + (f"-{rule}" if rule else "")
    return OperatingPoint(name=name, merging=TokenMerging(schedule=(count,), rule=rule), accuracy=0)


FULL: Final = OperatingPoint(name="full", accuracy=0)
POINTS: Final = (FULL, merging(4), merging(6), *(merging(count, STRONG_RULE) for count in STRONG))
"""Served points."""
COMPARED: Final = tuple(merging(count) for count in STRONG)
"""Points with the default rule at strong rates."""


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


def gains(
    hits: Mapping[str, Hits], pairs: Sequence[tuple[OperatingPoint, OperatingPoint]] = ()
) -> list[dict[str, object]]:
    """Accuracy gains of one point over another by task, on the same images.

    Without `pairs`, STRONG_RULE is compared with the default rule.
    """
    pairs = pairs or [(merging(count), merging(count, STRONG_RULE)) for count in STRONG]
    return [
        _gain(f"{other.name} against {base.name}", task, correct, hits[other.name][task])
        for base, other in pairs
        for task, correct in hits[base.name].items()
    ]


def _gain(name: str, task: str, first: NDArray[np.bool_], second: NDArray[np.bool_]) -> dict[str, object]:
    return {"of": name, "task": task, "n": len(first)} | {
        key: round(value, 4) for key, value in gain(first, second).items()
    }


def gain(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> dict[str, float]:
    """Accuracy gain of the second on the same images, with an interval from those that differ (Newcombe 1998)."""
    worse, better, n = int((first & ~second).sum()), int((second & ~first).sum()), len(first)
    difference = (better - worse) / n
    margin = 1.959964 * (better + worse - n * difference**2) ** 0.5 / n
    return {"gain": difference, "low": difference - margin, "high": difference + margin}
