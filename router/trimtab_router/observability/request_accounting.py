"""`RequestAccounting`: counts every request once, so that received = ok + late + dropped + refused + failed."""

import time
from collections.abc import Callable, Mapping

from trimtab_pipelines.request_outcome import (
    DROPPED,
    LATE,
    OK,
    OVERLOAD,
    REFUSED,
    ErrorCode,
    RequestOutcome,
    code_of,
    is_client_error,
)
from trimtab_pipelines.spec import ServiceLevel
from trimtab_router.execution.executor import RequestState
from trimtab_router.execution.response_metadata import StreamTiming
from trimtab_router.observability.arrivals import ArrivalCounter, PerRequestMean, RecentOutcomes
from trimtab_router.observability.metrics import Metrics
from trimtab_router.refusal import Refusal
from trimtab_router.scheduling.interfaces import Clock


class RequestAccounting:
    """Counts of requests by outcome.

    `arrivals` are the load to plan for. They include requests rejected for lack of capacity, but not those that exceed
    a client's own limits. `overloaded` is called with the number of requests rejected because too many are in flight.
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
        self.rows_per_request = PerRequestMean()  # rows per request and stage, of answered requests
        self.prompt_tokens = PerRequestMean()  # prompt tokens per row and stage, of admitted requests
        self.recent = RecentOutcomes()

    def count_received(self, now: float, requests: int = 1) -> None:
        self._metrics.received.value += requests
        self.recent.count_received(now, requests)

    def count_outcome(self, outcome: RequestOutcome, requests: int = 1) -> None:
        self._metrics.outcomes[outcome].inc(requests)
        self.recent.count_outcome(self._clock.now, outcome, requests)

    def record_response(self, state: RequestState) -> RequestOutcome:
        """Count a response, and record its latency and accuracy. Returns its outcome."""
        now, accuracy = self._clock.now, state.accuracy
        latency_seconds = now - state.arrived_at
        outcome = OK if state.met_slo(now, self._slo) else LATE
        self._metrics.outcomes[outcome].value += 1
        self._metrics.latency.observe(latency_seconds)
        self._metrics.accuracy.observe(accuracy)
        self.recent.record_response(now, outcome, latency_seconds, accuracy)
        self.rows_per_request.record(now, state.rows_by_stage)
        return outcome

    def record_prompt(self, state: RequestState, outcome: RequestOutcome) -> None:
        """Record the prompt of an admitted request. A refused one, such as a prompt that is too long, is no load."""
        if state.prompt_tokens and outcome in {OK, LATE, DROPPED}:
            self.prompt_tokens.record(self._clock.now, state.prompt_tokens)

    def record_stream(self, stream: StreamTiming) -> None:
        """Record the timing of a streamed response, complete or not, and its token counts if it is complete."""
        if stream.time_to_first_token is None:
            return
        self._metrics.tokens.observe_stream(stream, stream.images)
        for usage in stream.usage.values():
            self._metrics.tokens.count_tokens(usage, stream.images)

    def record_refusal(self, refusal: Refusal, *, own_deadline: bool = False) -> RequestOutcome:
        """Record why a request got no result. Returns its outcome, which `count_outcome` counts."""
        dropped_by_client = own_deadline and refusal.code in {ErrorCode.DEADLINE_EXCEEDED, ErrorCode.CANCELLED}
        if dropped_by_client:
            self.recent.count_dropped_by_client(self._clock.now)
        if dropped_by_client or refusal.client_error:
            self._metrics.client_errors.inc()
        if refusal.reason == OVERLOAD:
            self._overloaded(1)
        if refusal.outcome is DROPPED:
            self._metrics.count_drop(refusal.stage, refusal.reason)
        else:
            self._metrics.count_refusal(refusal.code.name, refusal.reason)
        return refusal.outcome

    def withdraw_arrival(self, arrived_at: float) -> None:
        """Remove the arrival of an invalid request from the load to plan for."""
        self._arrivals.withdraw(time.time() - (self._clock.now - arrived_at))

    def count_rejection(self, refusal: Refusal) -> Refusal:
        """Count a request refused before it was parsed. Returns the refusal, to be raised."""
        outcome = self.record_refusal(refusal)
        self.count_received(self._clock.now)
        self.count_outcome(outcome)
        if refusal.code is ErrorCode.RESOURCE_EXHAUSTED and not refusal.client_error:
            self._arrivals.record(time.time())
        return refusal

    def count_proxy_rejections(self, rejections: Mapping[tuple[int, str], int]) -> None:
        """Count requests that Envoy rejected, by (HTTP status, reason)."""
        for (status, reason), requests in rejections.items():
            self.count_received(self._clock.now, requests)
            self.count_outcome(REFUSED, requests)
            code = code_of(status)
            self._metrics.count_refusal(code.name, reason, requests)
            if is_client_error(code, reason):
                self._metrics.client_errors.inc(requests)
            if reason == OVERLOAD:  # requests rejected for lack of capacity are load to plan for
                self._arrivals.record(time.time(), requests)
                self._overloaded(requests)
