"""Counts second by second what the adapter plans with: arrivals, their recent peak, and what each brings. Pure."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trimtab_pipelines.router_state import HISTORY_SECONDS
from trimtab_router.observability.rolling_counter import RollingCounter

KEPT_SECONDS = 22_000  # a little over six hours, as far back as a forecast looks
PEAK_SECONDS = 10
RECENT_SECONDS = 60
RISING_SECONDS, FALLING_SECONDS = 5, 20
LEAST_REQUESTS = 20
"""Of which a change can be told from chance: the spread of fewer says little of what others bring."""
STANDARD_ERRORS = 3.0
"""How far chance moves a mean: it moves it farther once in a thousand looks."""


class ArrivalCounter:
    """Arrivals of each of the last 22,000 whole seconds, and of the one that runs.

    Time is Unix time in seconds, and may be set back: arrivals heaped up in one second would look like a peak, and be
    planned for.
    """

    def __init__(self, now: float) -> None:
        self._arrivals = RollingCounter(KEPT_SECONDS, int, now)

    def record(self, now: float, arrivals: int = 1) -> None:
        """Count arrivals in the second of `now`."""
        self._arrivals[now] += arrivals

    def history(self, now: float, seconds: int = HISTORY_SECONDS) -> list[int]:
        """Arrivals of the last so many whole seconds, oldest first; fewer while it has counted for less than that."""
        return self._arrivals.whole(now, seconds)

    def peak(self, now: float) -> int:
        """The most arrivals in one of the last ten whole seconds."""
        return max(self.history(now, PEAK_SECONDS), default=0)


class PerRequestMean:
    """What a request brings each stage: rows, or tokens of prompts. Time is monotonic seconds.

    That is the last minute's mean, or what the last five seconds surely show where it is more, and the last twenty
    where it is less: ten times the images would else be planned for a minute late, and paid for a minute too long.
    """

    def __init__(self) -> None:
        self._brought = RollingCounter[_Brought](RECENT_SECONDS, _Brought)
        self._whole = _Brought()
        """Of the whole seconds before this one."""
        self._least: dict[str, float] = {}
        self._most: dict[str, float] = {}
        self._summed_at: int | None = None

    def record(self, now: float, by_stage: Mapping[str, float]) -> None:
        """Count one request, with what it brings the stages that run for it."""
        brought = self._brought[now]
        brought.requests += 1
        for stage, amount in by_stage.items():
            brought.amounts[stage] = brought.amounts.get(stage, 0.0) + amount
            brought.squares[stage] = brought.squares.get(stage, 0.0) + amount * amount

    def expected(self, now: float) -> dict[str, float]:
        """Per request and stage; empty where there was no request in the last minute."""
        if self._summed_at != int(now):  # it is asked for with each request
            whole = self._brought.whole(now, RECENT_SECONDS)
            self._whole, self._summed_at = _sum(whole), int(now)
            self._least = _bound(_sum(whole[-RISING_SECONDS:]), self._whole, -STANDARD_ERRORS)
            self._most = _bound(_sum(whole[-FALLING_SECONDS:]), self._whole, STANDARD_ERRORS)
        running = self._brought[now]
        requests = self._whole.requests + running.requests
        totals = {**self._whole.amounts}
        _add(totals, running.amounts)
        return {
            stage: max(min(amount / requests, self._most.get(stage, math.inf)), self._least.get(stage, 0.0))
            for stage, amount in totals.items()
        }


@dataclass(slots=True)
class _Brought:
    """By requests of some seconds: how many they were, and sums of what each brought and of its square, by stage."""

    requests: int = 0
    amounts: dict[str, float] = field(default_factory=dict)
    squares: dict[str, float] = field(default_factory=dict)

    def mean(self, stage: str) -> float:
        """Of what a request brought."""
        return self.amounts.get(stage, 0.0) / self.requests

    def variance(self, stage: str) -> float:
        """Of what a request brought."""
        return max(self.squares.get(stage, 0.0) / self.requests - self.mean(stage) ** 2, 0.0)


def _sum(each: Iterable[_Brought]) -> _Brought:
    total = _Brought()
    for brought in each:
        total.requests += brought.requests
        _add(total.amounts, brought.amounts)
        _add(total.squares, brought.squares)
    return total


def _add(sums: dict[str, float], added: Mapping[str, float]) -> None:
    for stage, amount in added.items():
        sums[stage] = sums.get(stage, 0.0) + amount


def _bound(recent: _Brought, minute: _Brought, errors: float) -> dict[str, float]:
    """So many standard errors from what a request brought on average of late, by stage; of few nothing is sure.

    The spread is the minute's where that is wider: of few requests none may be one of the rare that bring much.
    """
    if recent.requests < LEAST_REQUESTS:
        return {}
    return {
        stage: recent.mean(stage) + errors * math.sqrt(max(recent.variance(stage), spread) / recent.requests)
        for stage, spread in ((stage, minute.variance(stage)) for stage in minute.amounts)
    }
