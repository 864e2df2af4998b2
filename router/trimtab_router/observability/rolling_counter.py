"""`RollingCounter`: counts per second over a bounded history."""

from collections.abc import Callable
from typing import Generic, TypeVar

Count = TypeVar("Count")
SLACK_SECONDS = 2
"""A clock set back by at most this much keeps counting in the newest second."""


class RollingCounter(Generic[Count]):
    """Counts of the last whole seconds and of the current one, on the clock of `now`.

    If the clock is set back further than the slack, counts after the new time are discarded.
    """

    def __init__(self, seconds: int, zero: Callable[[], Count], now: float = 0.0) -> None:
        self._zero = zero
        self._counts = [zero() for _ in range(seconds + 1)]
        self._second = self._first = int(now)

    def __getitem__(self, now: float) -> Count:
        return self._counts[self._slot(now)]

    def __setitem__(self, now: float, count: Count) -> None:
        self._counts[self._slot(now)] = count

    def complete_seconds(self, now: float, seconds: int) -> list[Count]:
        """Counts of the last whole seconds, oldest first. Shorter if the counter is younger."""
        self._slot(now)
        available = min(self._second - self._first, seconds, len(self._counts) - 1)
        return [self._counts[second % len(self._counts)] for second in range(self._second - available, self._second)]

    def _slot(self, now: float) -> int:
        second, size = int(now), len(self._counts)
        if second == self._second:
            return second % size
        if second < self._second - SLACK_SECONDS:
            self._second = second - 1
            self._first = min(self._first, second)
        for elapsed in range(max(self._second + 1, second - size + 1), second + 1):
            self._counts[elapsed % size] = self._zero()
        self._second = max(self._second, second)
        return self._second % size
