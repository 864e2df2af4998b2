"""Operating points of the small transformer, and points that are measured for comparison."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.operating_point import OperatingPoint, TokenMerging

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
