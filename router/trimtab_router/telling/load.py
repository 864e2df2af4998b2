"""Counts second by second what the adapter plans with: arrivals, their recent peak, and what each brings. Pure."""

from collections.abc import Iterable, Mapping

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
        self._whole: dict[str, float] = {}
        """Of the whole seconds before this one."""
        self._summed_at: int | None = None

    def record(self, now: float, by_stage: Mapping[str, float]) -> None:
        """Count one request, with what it brings the stages that run for it."""
        brought = self._brought[now]
        for stage, amount in {"": 1.0, **by_stage}.items():
            brought[stage] = brought.get(stage, 0.0) + amount

    def mean(self, now: float) -> dict[str, float]:
        """Per request and stage; empty where there was no request in the last minute."""
        if self._summed_at != int(now):  # it is asked for with each request
            self._whole, self._summed_at = _sum(self._brought.whole(now, RECENT_SECONDS)), int(now)
        totals = _sum([self._whole, self._brought[now]])
        requests = totals.pop("", 0.0)
        return {stage: amount / requests for stage, amount in totals.items()}


def _sum(each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for brought in each:
        for stage, amount in brought.items():
            totals[stage] = totals.get(stage, 0.0) + amount
    return totals
