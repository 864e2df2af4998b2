"""Outcome of a request, from its status code and its latency since the scheduled arrival.

A streamed response must also meet the SLOs of time to first token and time per output token.
"""

from dataclasses import dataclass

from trimtab_pipelines.request_outcome import RequestOutcome

OK_CODES = frozenset({"200", "OK"})
DROPPED_CODES = frozenset({"504", "DEADLINE_EXCEEDED"})
REFUSED_CODES = frozenset({"429", "503", "RESOURCE_EXHAUSTED", "UNAVAILABLE"})


@dataclass(frozen=True, slots=True)
class ClientTimings:
    """Timings of a response, or their SLOs, in seconds; an unknown timing is NaN, a missing SLO infinite."""

    latency_seconds: float
    """Time from the scheduled arrival to the end of the response."""
    first_token_seconds: float = float("nan")
    """Time from the scheduled arrival to the first event."""
    between_tokens_seconds: float = float("nan")
    """Mean time between two events. An event may hold several tokens, which makes this stricter than time per token."""

    def meets(self, slos: "ClientTimings") -> bool:
        """Whether each known timing is within its SLO."""
        return not (
            self.latency_seconds > slos.latency_seconds
            or self.first_token_seconds > slos.first_token_seconds
            or self.between_tokens_seconds > slos.between_tokens_seconds
        )


def classify(code: str, timings: ClientTimings, slos: ClientTimings) -> RequestOutcome:
    """Classify an HTTP status, a gRPC status name or the name of a client error."""
    if code in OK_CODES:
        return RequestOutcome.OK if timings.meets(slos) else RequestOutcome.LATE
    if code in DROPPED_CODES:
        return RequestOutcome.DROPPED
    return RequestOutcome.REFUSED if code in REFUSED_CODES else RequestOutcome.FAILED
