"""What became of the requests of the last minute, so that whoever asks now and then needs no history of its own. Pure.

A second of requests is one row of counters; latencies are counted in classes 5 % wide, which bounds the error of a
quantile as well as the memory. Time is monotonic seconds.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.router_state import Served
from trimtab_router.observability.rolling_counter import RollingCounter

RECENT_SECONDS = 60
QUANTILE = 0.99
LEAST_SECONDS = 1e-4
_CLASSES_PER_E = 1 / math.log(1.05)


@dataclass(slots=True)
class _Second:
    received: int = 0
    ends: Counter[RequestOutcome] = field(default_factory=Counter)
    classes: Counter[int] = field(default_factory=Counter)
    accuracy: float = 0.0


class RecentOutcomes:
    """Requests received and answered in the last 60 whole seconds and the one that runs."""

    def __init__(self) -> None:
        self._seconds = RollingCounter(RECENT_SECONDS, _Second)

    def received(self, now: float, requests: int = 1) -> None:
        """Count requests that came."""
        self._seconds[now].received += requests

    def ended(self, now: float, end: RequestOutcome, requests: int = 1) -> None:
        """Count requests by their end."""
        self._seconds[now].ends[end] += requests

    def answered(self, now: float, seconds: float, accuracy: float) -> None:
        """Note how long an answer took, and the expected accuracy of what served it."""
        second = self._seconds[now]
        second.classes[int(math.log(max(seconds, LEAST_SECONDS) / LEAST_SECONDS) * _CLASSES_PER_E)] += 1
        second.accuracy += accuracy

    def summary(self, now: float) -> Served:
        """Counts, the 99th percentile of latency and the mean accuracy; both None where nothing was answered."""
        seconds = [*self._seconds.whole(now, RECENT_SECONDS), self._seconds[now]]
        ends: Counter[RequestOutcome] = Counter()
        classes: Counter[int] = Counter()
        for second in seconds:
            ends.update(second.ends)
            classes.update(second.classes)
        answered = classes.total()
        accuracy = sum(second.accuracy for second in seconds) / answered if answered else None
        return Served(
            received=sum(second.received for second in seconds),
            **{end.word: ends[end] for end in RequestOutcome},
            p99_seconds=_quantile(classes, QUANTILE),
            accuracy=accuracy,
        )


def _quantile(classes: Counter[int], quantile: float) -> float | None:
    """The middle of the class in which the quantile lies."""
    below, wanted = 0, quantile * classes.total()
    for latency_class in sorted(classes):
        below += classes[latency_class]
        if below >= wanted:
            return LEAST_SECONDS * math.exp((latency_class + 0.5) / _CLASSES_PER_E)
    return None
