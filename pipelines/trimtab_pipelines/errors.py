"""Error classes that commands map to exit codes, and exponential backoff after failures."""

from collections.abc import Iterator
from itertools import count

_MAX_DOUBLINGS = 64
"""Doublings after which every backoff has reached its maximum."""


class UserError(Exception):
    """Invalid input from a user; the message names it and the valid form."""


class OperationFailed(Exception):
    """An operation failed; the message says which, and why."""


def pause_seconds(failures: int, initial_seconds: float, max_seconds: float) -> float:
    """Backoff after a number of consecutive failures: 0 without one, then doubling up to the maximum."""
    if failures < 1:
        return 0.0
    return min(initial_seconds * 2.0 ** min(failures - 1, _MAX_DOUBLINGS), max_seconds)


def backoff(initial_seconds: float, max_seconds: float) -> Iterator[float]:
    return (pause_seconds(failures, initial_seconds, max_seconds) for failures in count(1))
