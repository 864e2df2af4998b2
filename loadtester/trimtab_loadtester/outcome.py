"""What became of a request: every one ends as exactly one of ok, late, dropped, refused and failed.

The protocol's codes decide, and for an answer the time since its scheduled arrival.
"""

from enum import IntEnum

OK_CODES = frozenset({"200", "OK"})
DROPPED_CODES = frozenset({"504", "DEADLINE_EXCEEDED"})
REFUSED_CODES = frozenset({"429", "503", "RESOURCE_EXHAUSTED", "UNAVAILABLE"})


class RequestOutcome(IntEnum):
    """The five ends of a request."""

    OK = 0
    LATE = 1
    DROPPED = 2
    REFUSED = 3
    FAILED = 4


def classify(code: str, latency_seconds: float, slo_seconds: float) -> RequestOutcome:
    """Tell the outcome from an HTTP status, a gRPC status name or the name of what went wrong on the way."""
    if code in OK_CODES:
        return RequestOutcome.OK if latency_seconds <= slo_seconds else RequestOutcome.LATE
    if code in DROPPED_CODES:
        return RequestOutcome.DROPPED
    return RequestOutcome.REFUSED if code in REFUSED_CODES else RequestOutcome.FAILED
