"""Outcomes of offered requests, and their figures."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

OK = 200
"""A whole response. Other HTTP statuses are codes themselves."""
PENDING, ABANDONED, CONNECTION_CLOSED = 0, 1, 2
GRPC, RESET = 1000, 2000
"""A gRPC status or an HTTP/2 error code is added to these."""
GRPC_NAMES = {1: "CANCELLED", 4: "DEADLINE_EXCEEDED", 8: "RESOURCE_EXHAUSTED", 13: "INTERNAL", 14: "UNAVAILABLE"}
NAMES = {PENDING: "no_response", ABANDONED: "abandoned", CONNECTION_CLOSED: "connection_closed"}


class Outcomes:
    """Due, send and end times (monotonic seconds) and code of each request."""

    def __init__(self, due: Sequence[float]) -> None:
        self.due = due
        self.sent_at = array("d", bytes(8 * len(due)))
        self.ended_at = array("d", bytes(8 * len(due)))
        self.codes = array("i", bytes(4 * len(due)))
        self.in_flight = 0

    def begin(self, index: int, now: float) -> None:
        self.sent_at[index] = now
        self.in_flight += 1

    def end(self, index: int, code: int, now: float) -> None:
        self.codes[index] = code
        self.ended_at[index] = now
        self.in_flight -= 1


@dataclass(frozen=True, slots=True)
class OfferSummary:
    """Figures of one offered load. Latencies count from the time that a request was due, not from when it was sent."""

    offered_rps: float
    """Requests sent per second."""
    goodput_rps: float
    """Whole responses within the SLO per second."""
    p50_ms: float
    p99_ms: float
    """Of all whole responses, late ones included; 0 without any."""
    lag_p99_ms: float
    """Delay between due and sent: the generator is too slow, or has too few connections."""
    codes: dict[str, int]


def summarize(outcomes: Outcomes, seconds: float, slo_seconds: float) -> OfferSummary:
    pairs = zip(outcomes.codes, outcomes.ended_at, outcomes.due, strict=True)
    latencies = sorted(ended - due for code, ended, due in pairs if code == OK)
    in_time = sum(latency <= slo_seconds for latency in latencies)
    lags = sorted(sent - due for sent, due in zip(outcomes.sent_at, outcomes.due, strict=True) if sent)
    codes = Counter(map(code_name, outcomes.codes))
    codes["late"] = codes.pop("ok", 0) - in_time
    codes["ok"] = in_time
    return OfferSummary(
        offered_rps=round(len(lags) / seconds, 1),
        goodput_rps=round(in_time / seconds, 1),
        p50_ms=_quantile_ms(latencies, 0.5),
        p99_ms=_quantile_ms(latencies, 0.99),
        lag_p99_ms=_quantile_ms(lags, 0.99),
        codes={code: count for code, count in sorted(codes.items()) if count},
    )


def code_name(code: int) -> str:
    if code == OK:
        return "ok"
    if code >= RESET:
        return f"reset_{code - RESET}"
    if code >= GRPC:
        return GRPC_NAMES.get(code - GRPC, f"grpc_{code - GRPC}")
    return NAMES.get(code, str(code))


def _quantile_ms(ordered: Sequence[float], quantile: float) -> float:
    return round(1000 * ordered[min(int(quantile * len(ordered)), len(ordered) - 1)], 3) if ordered else 0.0
