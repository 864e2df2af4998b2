"""Counts second by second what the adapter plans with: arrivals, their recent peak, and rows per request. Pure."""

from collections import deque
from collections.abc import Mapping

from trimtab_pipelines.router_state import HISTORY_SECONDS

KEPT_SECONDS = 22_000  # a little over six hours, as far back as a forecast looks
PEAK_SECONDS = 10
RECENT_SECONDS = 60
SLACK_SECONDS = 2
"""A clock that is set back by less keeps counting in the newest second."""


class ArrivalCounter:
    """Arrivals of each of the last 22,000 whole seconds, and of the one that runs.

    Time is Unix time in seconds. Where the clock is set back, what was counted since the time it shows is forgotten,
    and it counts on from there: arrivals heaped up in one second would look like a peak, and be planned for.
    """

    def __init__(self, now: float) -> None:
        self._counts = [0] * (KEPT_SECONDS + 1)
        self._second = self._first = int(now)

    def record(self, now: float, arrivals: int = 1) -> None:
        """Count arrivals in the second of `now`."""
        self._move_to(now)
        self._counts[self._second % len(self._counts)] += arrivals

    def history(self, now: float, seconds: int = HISTORY_SECONDS) -> list[int]:
        """Arrivals of the last so many whole seconds, oldest first; fewer while it has counted for less than that."""
        self._move_to(now)
        seen = min(self._second - self._first, seconds, KEPT_SECONDS)
        return [self._counts[second % len(self._counts)] for second in range(self._second - seen, self._second)]

    def peak(self, now: float) -> int:
        """The most arrivals in one of the last ten whole seconds."""
        return max(self.history(now, PEAK_SECONDS), default=0)

    def _move_to(self, now: float) -> None:
        second = int(now)
        if second < self._second - SLACK_SECONDS:
            self._second = second
            self._first = min(self._first, second)
            self._counts[second % len(self._counts)] = 0
        for passed in range(max(self._second + 1, second - KEPT_SECONDS), second + 1):
            self._counts[passed % len(self._counts)] = 0
        self._second = max(self._second, second)


class RowCounter:
    """Rows each stage ran per answered request, over the last minute. Time is monotonic seconds."""

    def __init__(self) -> None:
        self._buckets: deque[tuple[int, dict[str, int]]] = deque()

    def record(self, now: float, rows_by_stage: Mapping[str, int]) -> None:
        """Count one request, with the rows of the stages that ran for it."""
        second = int(now)
        if not self._buckets or self._buckets[-1][0] != second:
            self._forget_before(second - RECENT_SECONDS)
            self._buckets.append((second, {"": 0}))
        counts = self._buckets[-1][1]
        counts[""] += 1
        for stage, rows in rows_by_stage.items():
            counts[stage] = counts.get(stage, 0) + rows

    def per_request(self, now: float) -> dict[str, float]:
        """Mean rows per request by stage; empty where no request was answered in the last minute."""
        self._forget_before(int(now) - RECENT_SECONDS)
        totals: dict[str, int] = {}
        for _, counts in self._buckets:
            for stage, rows in counts.items():
                totals[stage] = totals.get(stage, 0) + rows
        requests = totals.pop("", 0)
        return {stage: rows / requests for stage, rows in totals.items()}

    def _forget_before(self, second: int) -> None:
        while self._buckets and self._buckets[0][0] < second:
            self._buckets.popleft()
