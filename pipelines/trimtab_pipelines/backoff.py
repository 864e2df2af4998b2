"""How long to wait before what failed is tried again. Pure."""

from collections.abc import Iterator
from itertools import count

_MAX_DOUBLINGS = 64
"""Beyond which the longest pause is reached, whatever it is."""


def pause_seconds(failures: int, initial_seconds: float, max_seconds: float) -> float:
    """The pause after so many failures in a row: none before the first, then each twice the last up to the longest."""
    if failures < 1:
        return 0.0
    return min(initial_seconds * 2.0 ** min(failures - 1, _MAX_DOUBLINGS), max_seconds)


def backoff(initial_seconds: float, max_seconds: float) -> Iterator[float]:
    """Yield these pauses for ever."""
    return (pause_seconds(failures, initial_seconds, max_seconds) for failures in count(1))
