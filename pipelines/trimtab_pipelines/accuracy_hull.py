"""The best mixes of ways to serve a row: as much accuracy as its seconds can buy. Pure."""

from collections.abc import Sequence
from itertools import pairwise


def best_mixes(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of the upper hull of (seconds, accuracy), from no row served at all to the best point."""
    hull = [(0.0, 0.0)]
    for seconds, accuracy in sorted(points, key=lambda point: (point[0], -point[1])):
        if seconds <= 0 or accuracy <= hull[-1][1]:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], (seconds, accuracy)):
            hull.pop()
        hull.append((seconds, accuracy))
    return hull


def best_mix(points: Sequence[tuple[float, float]], seconds: float) -> tuple[float, float]:
    """The best mix that takes so many seconds a row at most, rows that are not served among them.

    Returns:
        Its accuracy, and how much more a second more would give.
    """
    curve = best_mixes(points)
    for left, right in pairwise(curve):
        if seconds < right[0]:
            slope = _slope(left, right)
            return left[1] + slope * (max(seconds, 0.0) - left[0]), slope
    return curve[-1][1], 0.0


def _slope(one: tuple[float, float], other: tuple[float, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])
