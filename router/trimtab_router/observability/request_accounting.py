"""Shell: a router's accounts. Every request is counted once: received = ok + late + dropped + refused + failed."""

import time
from collections.abc import Callable, Mapping

from trimtab_pipelines.error_codes import OVERLOAD, ErrorCode, code_of, is_client_error
from trimtab_pipelines.request_outcome import DROPPED, LATE, OK, REFUSED, RequestOutcome
from trimtab_pipelines.spec import ServiceLevel
from trimtab_router.execution.executor import RequestState
from trimtab_router.observability.arrivals import ArrivalCounter, PerRequestMean
from trimtab_router.observability.metrics import Metrics
from trimtab_router.observability.recent_outcomes import RecentOutcomes
from trimtab_router.refusal import Refusal
from trimtab_router.request.stream_timing import StreamTiming
from trimtab_router.scheduling.interfaces import Clock


class RequestAccounting:
    """What became of requests.

    Args:
        metrics: what is scraped.
        arrivals: the load to plan for; what was turned away for want of room belongs to it, but for what a client's own
            bounds turned away.
        clock: tells monotonic seconds.
        slo: the promise.
        overloaded: is told of how many requests were turned away because there are too many.
    """

    def __init__(
        self,
        metrics: Metrics,
        arrivals: ArrivalCounter,
        clock: Clock,
        slo: ServiceLevel,
        overloaded: Callable[[int], None],
    ) -> None:
        self._slo = slo
        self._metrics = metrics
        self._arrivals = arrivals
        self._clock = clock
        self._overloaded = overloaded
        self.rows = PerRequestMean()
        """Of requests that were answered."""
        self.prompt_tokens = PerRequestMean()
        """Of requests that came, as far as was known then; a row of each."""
        self.recent = RecentOutcomes()

    def received(self, at: float, requests: int = 1) -> None:
        """Count requests that came."""
        self._metrics.received.inc(requests)
        self.recent.received(at, requests)

    def ended(self, end: RequestOutcome, requests: int = 1) -> None:
        """Count how requests ended."""
        self._metrics.outcomes[end].inc(requests)
        self.recent.ended(self._clock.now, end, requests)

    def answered(self, journey: RequestState) -> RequestOutcome:
        """Note how long an answer took and how accurate it is; the end it comes to, counted by `ended`."""
        now = self._clock.now
        latency_seconds, accuracy = now - journey.arrived_at, journey.accuracy
        self._metrics.latency.observe(latency_seconds)
        self._metrics.accuracy.observe(accuracy)
        self.recent.answered(now, latency_seconds, accuracy)
        self.rows.record(now, journey.rows_by_stage)
        return OK if journey.in_time(now, self._slo) else LATE

    def delivered(self, delivery: StreamTiming) -> None:
        """Note when the pieces of an answer came, whether it is whole or not, and what it took if it is."""
        if delivery.first_seconds is None:
            return
        self._metrics.words.delivered(delivery, delivery.images)
        for usage in delivery.usage.values():
            self._metrics.words.took(usage, delivery.images)

    def refused(self, refusal: Refusal, *, by_own_deadline: bool = False) -> RequestOutcome:
        """Note why a request got no result; the end it comes to, counted by `ended`."""
        if refusal.callers_fault or (
            by_own_deadline and refusal.code in {ErrorCode.DEADLINE_EXCEEDED, ErrorCode.CANCELLED}
        ):
            self._metrics.client_errors.inc()
        if refusal.reason == OVERLOAD:
            self._overloaded(1)
        if refusal.end is DROPPED:
            self._metrics.dropped(refusal.stage, refusal.reason)
        else:
            self._metrics.refused(refusal.code.name, refusal.reason)
        return refusal.end

    def turned_away(self, refusal: Refusal) -> Refusal:
        """Count a request that was refused before it could be parsed; the refusal, to be raised."""
        end = self.refused(refusal)
        self.received(self._clock.now)
        self.ended(end)
        if refusal.code is ErrorCode.RESOURCE_EXHAUSTED and not refusal.callers_fault:
            self._arrivals.record(time.time())
        return refusal

    def refused_at_door(self, refused: Mapping[tuple[int, str], int]) -> None:
        """Count requests that the door in front of us refused, by (HTTP status, reason)."""
        for (status, reason), requests in refused.items():
            self.received(self._clock.now, requests)
            self.ended(REFUSED, requests)
            code = code_of(status)
            self._metrics.refused(code.name, reason, requests)
            if is_client_error(code, reason):
                self._metrics.client_errors.inc(requests)
            if reason == OVERLOAD:  # what was turned away for want of room is load to plan for
                self._arrivals.record(time.time(), requests)
                self._overloaded(requests)
