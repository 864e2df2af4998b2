"""`ConcurrencyLimit`: adaptive limit on the requests in flight, so that admitted requests meet the SLO.

By Little's law a request that joins n others, completed at rate r, waits n / r. While more load is offered than is
admitted, the measured rate is the capacity of the machine; n follows it, as a share of the latency SLO. Replicas that
may run faster operating points complete fewer requests than they could, so their capacity is the one at these points,
unless the event loop is late. The limit also falls when the requests in flight exceed what can finish within the SLO,
even if none has been rejected yet. It grows otherwise. It stays between the number of requests that keeps every replica
busy and the number that the plan's stages can serve within the SLO. Lateness of the event loop counts as waiting time,
because requests then wait uncounted in sockets.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab_router.scheduling.latency_model import StageCapacity
from trimtab_router.scheduling.policies.interface import DropPolicy

SLO_SHARE = 0.4  # mean latency that the limit aims at, as a share of the SLO; the rest is for variance
MIN_SHARE = 0.1
MIN_REQUESTS = 16
BUSY_FACTOR = 2.0
MAX_REQUESTS = 4096
CAPACITY_FACTOR = 2.0  # maximum limit, as a multiple of the requests that the stages can serve within one SLO
MEASURED_SECONDS = 0.2
MEASURED_SHARE = 0.2  # shortest measuring interval as a share of the SLO, longer before `MIN_RESPONSES`
MAX_MEASURED_SECONDS = 1.0
MIN_RESPONSES = 50
GROWTH = 1.25
ASSUMED_RPS = 1000.0  # assumed until a higher rate is measured, so that a first burst is admitted
RATE_DECAY = 0.99  # factor by which the best rate decays with each measurement
LATE_SHARE = 0.1  # lateness of the event loop, in SLOs, that is overload if it persists for `LATE_SAMPLES`
LATE_SAMPLES = 3
AGREEING_SAMPLES = 2  # measurements that must agree before the limit falls: one pause rejects nothing
OVERLOAD_FACTOR = 4.0  # requests in flight, as a multiple of what can finish in time, at which one measurement suffices
PAUSE_SHARE = 0.5  # lateness, in intervals, beyond which a single late sample is a pause and is ignored
FULL_SHARE = 0.9  # share at which the limit counts as reached: Envoy enforces it before the router does


@dataclass(frozen=True, slots=True)
class LoadSample:
    """Load of the router at one moment. Counts are since the start."""

    now: float
    """Monotonic seconds."""
    responses: int
    rejections: int
    """Requests rejected because the limit was reached."""
    in_flight: int
    late_seconds: float
    """Lateness of the event loop."""


@dataclass(frozen=True, slots=True)
class LimitBounds:
    """Bounds of the concurrency limit."""

    minimum: int = MIN_REQUESTS
    """Requests that keep every replica busy."""
    maximum: int = MAX_REQUESTS
    """Requests that the plan can serve in time."""
    busy_seconds: float | None = None
    """Time of full batches in all stages together, None if unknown."""
    fastest_rps: float = 0.0
    """Requests per second at the fastest operating points, if replicas also run slower ones; else 0."""

    @classmethod
    def of(
        cls,
        min_requests: float,
        max_requests: float | None,
        busy_seconds: float | None = None,
        fastest_rps: float = 0.0,
    ) -> "LimitBounds":
        """Bounds from the requests that keep every replica busy and those served within one SLO (None if unknown)."""
        minimum = min(max(MIN_REQUESTS, round(min_requests)), MAX_REQUESTS)
        maximum = MAX_REQUESTS if max_requests is None else min(round(max_requests), MAX_REQUESTS)
        return cls(minimum, max(minimum, maximum), busy_seconds, fastest_rps)

    def floor(self, rate: float) -> float:
        """Minimum limit at a rate of responses per second.

        If replicas are the bottleneck, they need full batches, queued and running. If the router is, batches are
        partial: twice what the stages hold at that rate is enough for the rate to grow.
        """
        if self.busy_seconds is None:
            return self.minimum
        return min(self.minimum, max(MIN_REQUESTS, BUSY_FACTOR * rate * self.busy_seconds))


def limit_bounds(
    stages: Sequence[tuple[StageCapacity, float]],
    slo_seconds: float,
    drop_policy: DropPolicy,
    *,
    has_slower: bool = False,
) -> LimitBounds | None:
    """Bounds from the capacity and rows per request of each active stage, None while a stage has no replica.

    `has_slower`: whether a stage may run slower operating points than those of its capacity.
    """
    if drop_policy != "Predicted":
        return LimitBounds(MAX_REQUESTS, MAX_REQUESTS)  # requests that may be late may wait
    if not all(capacity.rows for capacity, _ in stages):
        return None
    busy = BUSY_FACTOR * sum(capacity.rows / rows for capacity, rows in stages)
    if not stages or not all(capacity.seconds for capacity, _ in stages):
        return LimitBounds.of(busy, None)
    slowest_rps = min(capacity.rows / capacity.seconds / rows for capacity, rows in stages)
    busy_seconds = sum(capacity.seconds for capacity, _ in stages)
    fastest_rps = slowest_rps if has_slower else 0.0
    return LimitBounds.of(busy, CAPACITY_FACTOR * slo_seconds * slowest_rps, busy_seconds, fastest_rps)


class ConcurrencyLimit:
    """Concurrency limit that follows load samples."""

    def __init__(self, slo_seconds: float) -> None:
        self._slo_seconds = slo_seconds
        self._bounds = LimitBounds()
        self._floor = float(MIN_REQUESTS)
        self._best_rps = ASSUMED_RPS
        self._limit = ASSUMED_RPS * slo_seconds
        self._previous: LoadSample | None = None
        self._lateness: deque[float] = deque(maxlen=LATE_SAMPLES)
        self._peak = 0
        self._targets: deque[float] = deque(maxlen=AGREEING_SAMPLES)

    @property
    def limit(self) -> int:
        return int(min(max(self._limit, self._floor), self._bounds.maximum))

    def observe(self, sample: LoadSample, bounds: LimitBounds | None = None) -> None:
        """Adapt to a sample. Called several times a second while requests are in flight."""
        if bounds is not None:
            self._bounds = bounds
            self._floor = max(self._floor, bounds.floor(0.0))
        self._lateness.append(sample.late_seconds)
        self._peak = max(self._peak, sample.in_flight)
        previous = self._previous
        if previous is None:
            self._previous = sample
            return
        seconds = sample.now - previous.now
        responses = sample.responses - previous.responses
        min_seconds = max(MEASURED_SECONDS, MEASURED_SHARE * self._slo_seconds)
        max_seconds = max(MAX_MEASURED_SECONDS, self._slo_seconds)
        if seconds < min_seconds or (responses < MIN_RESPONSES and seconds < max_seconds):
            return
        paused = sample.late_seconds > PAUSE_SHARE * seconds and min(self._lateness) < LATE_SHARE * self._slo_seconds
        if not paused:
            self._adapt(previous, sample, responses / seconds)
        self._previous, self._peak = sample, 0

    def _adapt(self, previous: LoadSample, sample: LoadSample, rate: float) -> None:
        slo_seconds, self._floor = self._slo_seconds, self._bounds.floor(rate)
        self._best_rps = max(ASSUMED_RPS, RATE_DECAY * self._best_rps, rate)
        late = min(self._lateness) if len(self._lateness) == LATE_SAMPLES else 0.0
        lags = late > LATE_SHARE * slo_seconds
        slow = lags and self._peak >= self._floor
        if not lags:
            rate = max(rate, self._bounds.fastest_rps)
        persistent = min(previous.in_flight, sample.in_flight)
        crowded = persistent > max(rate * slo_seconds, self._floor)
        full = self._peak >= FULL_SHARE * self.limit
        if slow or crowded or full or sample.rejections > previous.rejections:
            self._targets.append(rate * max(SLO_SHARE * slo_seconds - late, MIN_SHARE * slo_seconds))
            overloaded = sample.in_flight > OVERLOAD_FACTOR * max(rate * slo_seconds, self._floor)
            if len(self._targets) == AGREEING_SAMPLES or overloaded:
                self._limit = min(max(*self._targets, self._floor), self.limit * 2.0)
        else:
            self._limit = min(self.limit * GROWTH, self._best_rps * slo_seconds, self._bounds.maximum)
            if self._targets:
                self._targets.popleft()

    def reset(self) -> None:
        """Discard the measurements: without requests in flight they say nothing about the next load."""
        self._previous, self._peak = None, 0
        self._lateness.clear()
