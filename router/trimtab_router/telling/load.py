"""Counts second by second what the adapter plans with: arrivals, their recent peak, and what each brings. Pure."""

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


class PerRequest:
    """What a request brings each stage, over the last minute: rows, or tokens of prompts. Time is monotonic seconds."""

    def __init__(self) -> None:
        self._brought = PerSecond[dict[str, float]](RECENT_SECONDS, dict)

    def record(self, now: float, by_stage: Mapping[str, float]) -> None:
        """Count one request, with what it brings the stages that run for it."""
        brought = self._brought[now]
        for stage, amount in {"": 1.0, **by_stage}.items():
            brought[stage] = brought.get(stage, 0.0) + amount

    def mean(self, now: float) -> dict[str, float]:
        """Per request and stage; empty where there was no request in the last minute."""
        totals: dict[str, float] = {}
        for brought in (self._brought[now], *self._brought.whole(now, RECENT_SECONDS)):
            for stage, amount in brought.items():
                totals[stage] = totals.get(stage, 0.0) + amount
        requests = totals.pop("", 0.0)
        return {stage: amount / requests for stage, amount in totals.items()}
