"""Counts second by second what the adapter plans with: arrivals, their recent peak, and rows per request. Pure."""

from collections import Counter
from collections.abc import Mapping

from trimtab_pipelines.router_state import HISTORY_SECONDS
from trimtab_router.telling.per_second import PerSecond

KEPT_SECONDS = 22_000  # a little over six hours, as far back as a forecast looks
PEAK_SECONDS = 10
RECENT_SECONDS = 60


class ArrivalCounter:
    """Arrivals of each of the last 22,000 whole seconds, and of the one that runs.

    Time is Unix time in seconds, and may be set back: arrivals heaped up in one second would look like a peak, and be
    planned for.
    """

    def __init__(self, now: float) -> None:
        self._arrivals = PerSecond(KEPT_SECONDS, int, now)

    def record(self, now: float, arrivals: int = 1) -> None:
        """Count arrivals in the second of `now`."""
        self._arrivals[now] += arrivals

    def history(self, now: float, seconds: int = HISTORY_SECONDS) -> list[int]:
        """Arrivals of the last so many whole seconds, oldest first; fewer while it has counted for less than that."""
        return self._arrivals.whole(now, seconds)

    def peak(self, now: float) -> int:
        """The most arrivals in one of the last ten whole seconds."""
        return max(self.history(now, PEAK_SECONDS), default=0)


class RowCounter:
    """Rows each stage ran per answered request, over the last minute. Time is monotonic seconds."""

    def __init__(self) -> None:
        self._rows = PerSecond[Counter[str]](RECENT_SECONDS, Counter)

    def record(self, now: float, rows_by_stage: Mapping[str, int]) -> None:
        """Count one request, with the rows of the stages that ran for it."""
        counts = self._rows[now]
        counts[""] += 1
        for stage, rows in rows_by_stage.items():
            counts[stage] += rows

    def per_request(self, now: float) -> dict[str, float]:
        """Mean rows per request by stage; empty where no request was answered in the last minute."""
        totals = Counter(self._rows[now])
        for counts in self._rows.whole(now, RECENT_SECONDS):
            totals.update(counts)
        requests = totals.pop("", 0)
        return {stage: rows / requests for stage, rows in totals.items()}
