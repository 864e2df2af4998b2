"""Upper hull of (seconds, accuracy): the best mixes of options for serving a row."""

from collections.abc import Sequence
from itertools import pairwise


def best_mixes(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Corners of the upper hull of (seconds, accuracy), from serving no row to the best option."""
    hull = [(0.0, 0.0)]
    for seconds, accuracy in sorted(points, key=lambda point: (point[0], -point[1])):
        if seconds <= 0 or accuracy <= hull[-1][1]:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], (seconds, accuracy)):
            hull.pop()
        hull.append((seconds, accuracy))
    return hull


def best_mix(points: Sequence[tuple[float, float]], seconds: float) -> tuple[float, float]:
    """Best mix that takes at most these seconds per row; unserved rows are part of the mix.

    Returns:
        Its accuracy, and the accuracy gained per additional second.
    """
    curve = best_mixes(points)
    for left, right in pairwise(curve):
        if seconds < right[0]:
            slope = _slope(left, right)
            return left[1] + slope * (max(seconds, 0.0) - left[0]), slope
    return curve[-1][1], 0.0


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])
