"""Outcome of a request, from its status code and its latency since the scheduled arrival.

A streamed answer must also meet the SLOs of time to first token and time per output token.
"""

from dataclasses import dataclass

from trimtab_pipelines.request_outcome import RequestOutcome

OK_CODES = frozenset({"200", "OK"})
DROPPED_CODES = frozenset({"504", "DEADLINE_EXCEEDED"})
REFUSED_CODES = frozenset({"429", "503", "RESOURCE_EXHAUSTED", "UNAVAILABLE"})


@dataclass(frozen=True, slots=True)
class ClientTimings:
    """What is promised of an answer, or what became of it, in seconds; infinite or NaN where nothing is known.

    Attributes:
        latency_seconds: from its scheduled arrival until it was whole.
        first_token_seconds: from then until its first piece.
        between_tokens_seconds: from one piece to the next, on average. A client cannot see tokens: a piece of several
            makes this the stricter of both.
    """

    latency_seconds: float
    first_token_seconds: float = float("nan")
    between_tokens_seconds: float = float("nan")

    def within(self, promised: "ClientTimings") -> bool:
        """Whether each was in time; what is not known broke no promise."""
        return not (
            self.latency_seconds > promised.latency_seconds
            or self.first_token_seconds > promised.first_token_seconds
            or self.between_tokens_seconds > promised.between_tokens_seconds
        )


def classify(code: str, took: ClientTimings, promised: ClientTimings) -> RequestOutcome:
    """Classify an HTTP status, a gRPC status name or the name of a client error."""
    if code in OK_CODES:
        return RequestOutcome.OK if took.within(promised) else RequestOutcome.LATE
    if code in DROPPED_CODES:
        return RequestOutcome.DROPPED
    return RequestOutcome.REFUSED if code in REFUSED_CODES else RequestOutcome.FAILED
