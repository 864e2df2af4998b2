"""How long to wait before what failed is tried again. Pure."""

from collections.abc import Iterator
from itertools import count

_MOST_DOUBLINGS = 64
"""Beyond which the longest pause is reached, whatever it is."""


def pause_seconds(failures: int, first_seconds: float, longest_seconds: float) -> float:
    """The pause after so many failures in a row: none before the first, then each twice the last up to the longest."""
    if failures < 1:
        return 0.0
    return min(first_seconds * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), longest_seconds)


def backoff(first_seconds: float, longest_seconds: float) -> Iterator[float]:
    """Yield these pauses for ever."""
    return (pause_seconds(failures, first_seconds, longest_seconds) for failures in count(1))
