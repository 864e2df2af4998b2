"""What became of a request. The protocol's codes decide, and for an answer the time since its scheduled arrival."""

from trimtab_pipelines.ends import End

OK_CODES = frozenset({"200", "OK"})
DROPPED_CODES = frozenset({"504", "DEADLINE_EXCEEDED"})
REFUSED_CODES = frozenset({"429", "503", "RESOURCE_EXHAUSTED", "UNAVAILABLE"})


def classify(code: str, latency_seconds: float, slo_seconds: float) -> End:
    """Tell the outcome from an HTTP status, a gRPC status name or the name of what went wrong on the way."""
    if code in OK_CODES:
        return End.OK if latency_seconds <= slo_seconds else End.LATE
    if code in DROPPED_CODES:
        return End.DROPPED
    return End.REFUSED if code in REFUSED_CODES else End.FAILED
