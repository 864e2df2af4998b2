"""Counts of recent seconds: arrivals and their peak, rows or tokens per request, and outcomes."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.router_state import HISTORY_SECONDS, RecentRequests
from trimtab_router.scheduling.winsorizer import Winsorizer

Count = TypeVar("Count")
SLACK_SECONDS = 2  # a clock set back by at most this much keeps counting in the newest second
KEPT_SECONDS = 22_000  # a little over six hours, the history of a forecast
PEAK_SECONDS = 10
RECENT_SECONDS = 60
RISING_SECONDS, FALLING_SECONDS = 5, 20
MIN_REQUESTS = 20  # minimum number of requests from which a change can be distinguished from chance
STANDARD_ERRORS = 3.0  # confidence bound: chance moves a mean further than this once in a thousand samples


class RollingCounter(Generic[Count]):
    """Counts of the last whole seconds and of the current one, on the clock of `now`.

    If the clock is set back further than the slack, counts after the new time are discarded.
    """

    def __init__(self, seconds: int, zero: Callable[[], Count], now: float = 0.0) -> None:
        self._zero = zero
        self._counts = [zero() for _ in range(seconds + 1)]
        self._second = self._first = int(now)

    def __getitem__(self, now: float) -> Count:
        second = int(now)
        if second == self._second:  # the common case, several times a request
            return self._counts[second % len(self._counts)]
        return self._counts[self._slot(now)]

    def __setitem__(self, now: float, count: Count) -> None:
        self._counts[self._slot(now)] = count

    def revise(self, then: float, change: Callable[[Count], Count]) -> None:
        """Change the count of an earlier second, if it is still kept."""
        second, size = int(then), len(self._counts)
        if self._second - size < second <= self._second:
            self._counts[second % size] = change(self._counts[second % size])

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


class ArrivalCounter:
    """Arrivals of the last 22,000 whole seconds and of the current one.

    Time is Unix time in seconds and may be set back. Arrivals heaped up in one second would otherwise look like a peak.
    """

    def __init__(self, now: float) -> None:
        self._arrivals = RollingCounter(KEPT_SECONDS, int, now)

    def record(self, now: float, arrivals: int = 1) -> None:
        self._arrivals[now] += arrivals

    def withdraw(self, then: float) -> None:
        """Remove an arrival of the last seconds whose request proved invalid: it is no load."""
        self._arrivals.revise(then, lambda arrivals: max(arrivals - 1, 0))

    def history(self, now: float, seconds: int = HISTORY_SECONDS) -> list[int]:
        return self._arrivals.complete_seconds(now, seconds)

    def current(self, now: float) -> int:
        """Arrivals since the last whole second."""
        return self._arrivals[now]

    def peak(self, now: float) -> int:
        """Most arrivals in one of the last ten whole seconds."""
        return max(self.history(now, PEAK_SECONDS), default=0)


class PerRequestMean:
    """Mean amount per request and stage, in rows or prompt tokens. Time is monotonic seconds.

    The mean is that of the last minute, but at least the lower confidence bound of the last five seconds and at most
    the upper bound of the last twenty. Otherwise a tenfold change would be planned for a minute late, and paid for a
    minute too long. The largest amounts are clipped if they are rare.
    """

    def __init__(self) -> None:
        self._winsorizers: defaultdict[str, Winsorizer] = defaultdict(Winsorizer)
        self._amounts = RollingCounter[_Totals](RECENT_SECONDS, _Totals)
        self._minute = _Totals()  # totals of the whole seconds before the current one
        self._lower: dict[str, float] = {}
        self._upper: dict[str, float] = {}
        self._minute_second: int | None = None

    def record(self, now: float, by_stage: Mapping[str, float]) -> None:
        brought = self._amounts[now]
        brought.requests += 1
        for stage, brought_amount in by_stage.items():
            amount = self._winsorizers[stage].clip(brought_amount)
            brought.amounts[stage] = brought.amounts.get(stage, 0.0) + amount
            brought.squares[stage] = brought.squares.get(stage, 0.0) + amount * amount

    def expected(self, now: float) -> dict[str, float]:
        """Mean per request by stage. Empty without requests in the last minute."""
        if self._minute_second != int(now):  # called with each request
            whole = self._amounts.complete_seconds(now, RECENT_SECONDS)
            self._minute, self._minute_second = _sum(whole), int(now)
            self._lower = _bound(_sum(whole[-RISING_SECONDS:]), self._minute, -STANDARD_ERRORS)
            self._upper = _bound(_sum(whole[-FALLING_SECONDS:]), self._minute, STANDARD_ERRORS)
        running = self._amounts[now]
        requests = self._minute.requests + running.requests
        totals = {**self._minute.amounts}
        _add(totals, running.amounts)
        return {
            stage: max(min(amount / requests, self._upper.get(stage, math.inf)), self._lower.get(stage, 0.0))
            for stage, amount in totals.items()
        }


@dataclass(slots=True)
class _Totals:
    """Number of requests of some seconds, and sums of their amounts and squared amounts by stage."""

    requests: int = 0
    amounts: dict[str, float] = field(default_factory=dict)
    squares: dict[str, float] = field(default_factory=dict)

    def mean(self, stage: str) -> float:
        return self.amounts.get(stage, 0.0) / self.requests

    def variance(self, stage: str) -> float:
        return max(self.squares.get(stage, 0.0) / self.requests - self.mean(stage) ** 2, 0.0)


def _sum(seconds: Iterable[_Totals]) -> _Totals:
    total = _Totals()
    for brought in seconds:
        total.requests += brought.requests
        _add(total.amounts, brought.amounts)
        _add(total.squares, brought.squares)
    return total


def _add(sums: dict[str, float], added: Mapping[str, float]) -> None:
    for stage, amount in added.items():
        sums[stage] = sums.get(stage, 0.0) + amount


def _bound(recent: _Totals, minute: _Totals, errors: float) -> dict[str, float]:
    """Mean of the recent requests plus or minus standard errors, by stage. Empty for too few requests.

    The spread is that of the minute if it is larger: among few requests none may be one of the rare large ones.
    """
    if recent.requests < MIN_REQUESTS:
        return {}
    return {
        stage: recent.mean(stage) + errors * math.sqrt(max(recent.variance(stage), spread) / recent.requests)
        for stage, spread in ((stage, minute.variance(stage)) for stage in minute.amounts)
    }


QUANTILE = 0.99
MIN_SECONDS = 1e-4
_BUCKETS_PER_E = 1 / math.log(1.05)  # buckets 5 % wide bound the error of a quantile and the memory


@dataclass(slots=True)
class _Second:
    received: int = 0
    dropped_by_client: int = 0
    outcomes: Counter[RequestOutcome] = field(default_factory=Counter)
    buckets: Counter[int] = field(default_factory=Counter)
    accuracy: float = 0.0


class RecentOutcomes:
    """Requests received and answered in the last 60 whole seconds and the current one."""

    def __init__(self) -> None:
        self._seconds = RollingCounter(RECENT_SECONDS, _Second)

    def count_received(self, now: float, requests: int = 1) -> None:
        self._seconds[now].received += requests

    def count_outcome(self, now: float, outcome: RequestOutcome, requests: int = 1) -> None:
        self._seconds[now].outcomes[outcome] += requests

    def count_dropped_by_client(self, now: float) -> None:
        self._seconds[now].dropped_by_client += 1

    def record_response(self, now: float, outcome: RequestOutcome, seconds: float, accuracy: float) -> None:
        second = self._seconds[now]
        second.outcomes[outcome] += 1
        second.buckets[int(math.log(max(seconds, MIN_SECONDS) / MIN_SECONDS) * _BUCKETS_PER_E)] += 1
        second.accuracy += accuracy

    def summary(self, now: float) -> RecentRequests:
        """Counts, 99th percentile of latency and mean accuracy. Both are None without responses."""
        seconds = [*self._seconds.complete_seconds(now, RECENT_SECONDS), self._seconds[now]]
        outcomes: Counter[RequestOutcome] = Counter()
        buckets: Counter[int] = Counter()
        for second in seconds:
            outcomes.update(second.outcomes)
            buckets.update(second.buckets)
        record_response = buckets.total()
        accuracy = sum(second.accuracy for second in seconds) / record_response if record_response else None
        return RecentRequests(
            received=sum(second.received for second in seconds),
            dropped_by_client=sum(second.dropped_by_client for second in seconds),
            **{outcome.word: outcomes[outcome] for outcome in RequestOutcome},
            p99_seconds=_quantile(buckets, QUANTILE),
            accuracy=accuracy,
        )


def _quantile(buckets: Counter[int], quantile: float) -> float | None:
    below, rank = 0, quantile * buckets.total()
    for bucket in sorted(buckets):
        below += buckets[bucket]
        if below >= rank:
            return MIN_SECONDS * math.exp((bucket + 0.5) / _BUCKETS_PER_E)
    return None
