"""What each task's images are answered at each point, on images that nothing was trained or tuned on."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trimtab_model_servers.transformer.checkpoints import Checkpoint
from trimtab_pipelines.accuracy_evidence import wilson_interval
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_training.task_training import logits_of
from trimtab_training.vit_tasks.datasets import Images
from trimtab_training.vit_tasks.operating_points import FULL, POINTS, Hits, gains

VARIANT = "vit-small"
ALL = "all"
Advance = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """One task's images as one point scores them.

    Attributes:
        logits: float32 [n, classes].
        labels: the truth, int64 [n].
    """

    logits: Tensor
    labels: Tensor

    @property
    def right(self) -> NDArray[np.bool_]:
        """Which images are answered rightly. Shape (n,)."""
        found: NDArray[np.bool_] = (self.logits.argmax(dim=1) == self.labels).numpy()
        return found


ByTask = Mapping[str, Scored]


def at_points(
    stored: Checkpoint, points: Iterable[OperatingPoint], held_out: Mapping[str, Images], advance: Advance
) -> dict[str, ByTask]:
    """Score every task's images at every point: by point, then task."""
    found: dict[str, ByTask] = {}
    for point in points:
        found[point.name] = {
            task: Scored(logits_of(stored, point, task, images.pixels), images.labels)
            for task, images in held_out.items()
        }
        advance(point.name)
    return found


def hits_of(scored: Mapping[str, ByTask]) -> dict[str, Hits]:
    """Which images are answered rightly: by point, then task."""
    return {point: {task: one.right for task, one in by_task.items()} for point, by_task in scored.items()}


def report(
    found: Mapping[str, Hits], variant: str = VARIANT, points: Sequence[OperatingPoint] = POINTS
) -> dict[str, Any]:
    """Write what was measured as ``accuracy.json`` holds it."""
    full = share(np.concatenate(list(found[FULL.name].values())))
    return {
        "split": "held-out by photo column, by digit image and by portrait; crops of one photo overlap",
        "interval": "Wilson, 95 %; of a gain, 95 % from the images on which two points differ",
        "variants": {variant: {"accuracy" if key == "value" else key: number for key, number in full.items()}},
        "points": {point.name: _by_task(found[point.name]) for point in points},
    } | ({"gains": gains(found)} if points is POINTS else {})


def share(right: NDArray[np.bool_]) -> dict[str, float | int]:
    """A share of right answers with its Wilson interval."""
    value, ends = float(right.mean()), wilson_interval(int(right.sum()), len(right))
    return {"value": round(value, 4), "n": len(right), "low": round(ends[0], 4), "high": round(ends[1], 4)}


def _by_task(found: Hits) -> dict[str, dict[str, float | int]]:
    """Shares by task; under ALL that of all images together, which is what a point of unknown tasks is worth."""
    return {task: share(right) for task, right in found.items()} | {ALL: share(np.concatenate(list(found.values())))}
