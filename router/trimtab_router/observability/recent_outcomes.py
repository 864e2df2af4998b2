"""`RecentOutcomes`: outcomes, latency and accuracy of the requests of the last minute.

Each second is one row of counters. Latencies are counted in buckets 5 % wide, which bounds the error of a quantile and
the memory. Time is monotonic seconds.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.router_state import RecentRequests
from trimtab_router.observability.arrivals import RollingCounter

RECENT_SECONDS = 60
QUANTILE = 0.99
MIN_SECONDS = 1e-4
_BUCKETS_PER_E = 1 / math.log(1.05)


@dataclass(slots=True)
class _Second:
    received: int = 0
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

    def record_response(self, now: float, seconds: float, accuracy: float) -> None:
        second = self._seconds[now]
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
