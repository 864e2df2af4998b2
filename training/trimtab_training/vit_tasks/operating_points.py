"""The ways in which the small transformer is served, and what is measured beside them to know why these."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.operating_point import OperatingPoint, TokenMerging

STRONG_RULE: Final = "guided"
STRONG: Final = (8, 10)
"""Tokens merged in each layer from which the rule for strong rates is served; of 64 patches 10 leave two."""
Hits = Mapping[str, NDArray[np.bool_]]
"""Whether each held-out image of a task was answered rightly, by task."""


def merging(count: int, rule: str | None = None) -> OperatingPoint:
    """A point that merges so many tokens in each layer; its accuracy is yet to be measured."""
    name = f"merge-{count}" + (f"-{rule}" if rule else "")
    return OperatingPoint(name=name, merging=TokenMerging(schedule=(count,), rule=rule), accuracy=0)


FULL: Final = OperatingPoint(name="full", accuracy=0)
POINTS: Final = (FULL, merging(4), merging(6), *(merging(count, STRONG_RULE) for count in STRONG))
"""Served. Their accuracies stand in `accuracy.json`, and from there in the pipeline."""
COMPARED: Final = tuple(merging(count) for count in STRONG)
"""What the rule for strong rates is held against."""


def gains(
    found: Mapping[str, Hits], pairs: Sequence[tuple[OperatingPoint, OperatingPoint]] = ()
) -> list[dict[str, object]]:
    """How much more is right by one point than by another: task by task, on the same images.

    Without `pairs`: by the rule for strong rates than by the first rule.
    """
    pairs = pairs or [(merging(count), merging(count, STRONG_RULE)) for count in STRONG]
    return [
        _gain(f"{other.name} against {first.name}", task, right, found[other.name][task])
        for first, other in pairs
        for task, right in found[first.name].items()
    ]


def _gain(name: str, task: str, first: NDArray[np.bool_], second: NDArray[np.bool_]) -> dict[str, object]:
    found = {key: round(value, 4) for key, value in gain(first, second).items()}
    return {"of": name, "task": task, "n": len(first), **found}


def gain(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> dict[str, float]:
    """Compare two ways on the same images; the interval is from those on which they differ (Newcombe 1998)."""
    worse, better, n = int((first & ~second).sum()), int((second & ~first).sum()), len(first)
    more = (better - worse) / n
    reach = 1.959964 * (better + worse - n * more**2) ** 0.5 / n
    return {"gain": more, "low": more - reach, "high": more + reach}
