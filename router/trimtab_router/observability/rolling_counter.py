"""Counts second by second, for as long as anybody asks back. Pure."""

from collections.abc import Callable
from typing import Generic, TypeVar

Count = TypeVar("Count")
SLACK_SECONDS = 2
"""A clock that is set back by less keeps counting in the newest second."""


class RollingCounter(Generic[Count]):
    """A count for each of the last whole seconds, and for the one that runs.

    Where the clock is set back, what was counted since the time it shows is forgotten, and it counts on from there.

    Args:
        seconds: how many whole seconds are kept.
        nothing: makes the count of a second in which nothing happened.
        now: when counting begins, on the clock of all later times, in seconds.
    """

    def __init__(self, seconds: int, nothing: Callable[[], Count], now: float = 0.0) -> None:
        self._nothing = nothing
        self._counts = [nothing() for _ in range(seconds + 1)]
        self._second = self._first = int(now)

    def __getitem__(self, now: float) -> Count:
        """The count of the second that runs."""
        return self._counts[self._place(now)]

    def __setitem__(self, now: float, count: Count) -> None:
        """Replace it."""
        self._counts[self._place(now)] = count

    def whole(self, now: float, seconds: int) -> list[Count]:
        """The counts of the last so many whole seconds, oldest first; fewer while it has counted for less than that."""
        self._place(now)
        seen = min(self._second - self._first, seconds, len(self._counts) - 1)
        return [self._counts[second % len(self._counts)] for second in range(self._second - seen, self._second)]

    def _place(self, now: float) -> int:
        second, kept = int(now), len(self._counts)
        if second == self._second:
            return second % kept
        if second < self._second - SLACK_SECONDS:
            self._second = second - 1
            self._first = min(self._first, second)
        for passed in range(max(self._second + 1, second - kept + 1), second + 1):
            self._counts[passed % kept] = self._nothing()
        self._second = max(self._second, second)
        return self._second % kept
