"""How often each task is answered rightly at each point, on images that nothing was trained or tuned on."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.nn.functional import linear

from trimtab_model_servers.tokens.rules import RULES
from trimtab_model_servers.tokens.schedule import in_each_layer
from trimtab_model_servers.tokens.stored import Stored
from trimtab_model_servers.tokens.transformer import Course
from trimtab_model_servers.tokens.ways import PLAIN
from trimtab_model_servers.vit_tasks.fit import features_of
from trimtab_model_servers.vit_tasks.points import FULL, POINTS, Hits, gains
from trimtab_model_servers.vit_tasks.sources import Images
from trimtab_pipelines.evidence import wilson_interval
from trimtab_pipelines.operating_point import OperatingPoint

VARIANT = "vit-small"
ALL = "all"
Advance = Callable[[str], None]


def course_of(point: OperatingPoint, depth: int) -> Course:
    """The course of a point that merges or does nothing."""
    given = point.merging
    merged = in_each_layer(given.schedule if given else (), depth)
    return Course(merged, RULES[given.rule if given and given.rule else next(iter(RULES))])


def at_points(
    stored: Stored, points: Iterable[OperatingPoint], held_out: Mapping[str, Images], advance: Advance
) -> dict[str, Hits]:
    """Answer every task at every point: hits by point, then task."""
    found: dict[str, Hits] = {}
    for point in points:
        course = course_of(point, stored.transformer.shape.depth)
        right = {}
        for task, images in held_out.items():
            head = stored.heads[PLAIN][task]
            logits = linear(features_of(stored.transformer, images, course), head.weight, head.bias)
            right[task] = (logits.argmax(dim=1) == images.labels).numpy()
        found[point.name] = right
        advance(point.name)
    return found


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
