"""Outcomes of the requests offered, and their figures."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

OK = 200
"""Answered whole; the other HTTP statuses stand for themselves."""
PENDING, GAVE_UP, CUT = 0, 1, 2
GRPC, RESET = 1000, 2000
"""A gRPC status or an HTTP/2 error code is added to these."""
GRPC_NAMES = {1: "CANCELLED", 4: "DEADLINE_EXCEEDED", 8: "RESOURCE_EXHAUSTED", 13: "INTERNAL", 14: "UNAVAILABLE"}
PLAIN_NAMES = {PENDING: "no_answer", GAVE_UP: "gave_up", CUT: "cut"}


class Board:
    """When each request was due, was sent and ended (monotonic seconds), and with which code."""

    def __init__(self, due: Sequence[float]) -> None:
        self.due = due
        self.sent_at = array("d", bytes(8 * len(due)))
        self.ended_at = array("d", bytes(8 * len(due)))
        self.codes = array("i", bytes(4 * len(due)))
        self.under_way = 0

    def begin(self, index: int, now: float) -> None:
        """A request was handed to the system."""
        self.sent_at[index] = now
        self.under_way += 1

    def end(self, index: int, code: int, now: float) -> None:
        """A request that had begun has its answer, or will have none."""
        self.codes[index] = code
        self.ended_at[index] = now
        self.under_way -= 1


@dataclass(frozen=True, slots=True)
class Tally:
    """What a phase came to. Latencies run from the moment a request was due, whenever it could be sent."""

    offered_rps: float
    """Requests sent in the phase, a second: what really knocked."""
    goodput_rps: float
    """Answered whole within the SLO, a second."""
    p50_ms: float
    p99_ms: float
    """Of all that were answered whole, late ones included; 0 where none was."""
    lag_p99_ms: float
    """How much later than due requests were sent: the generator's own fault, or that of too few connections."""
    codes: dict[str, int]


def tally(board: Board, seconds: float, slo_seconds: float) -> Tally:
    """Sum up a phase that has ended."""
    latencies = sorted(board.ended_at[i] - board.due[i] for i in range(len(board.due)) if board.codes[i] == OK)
    in_time = sum(latency <= slo_seconds for latency in latencies)
    lags = sorted(sent - due for sent, due in zip(board.sent_at, board.due, strict=True) if sent)
    codes = Counter(map(name, board.codes))
    codes["late"] = codes.pop("ok", 0) - in_time
    codes["ok"] = in_time
    return Tally(
        offered_rps=round(len(lags) / seconds, 1),
        goodput_rps=round(in_time / seconds, 1),
        p50_ms=_quantile_ms(latencies, 0.5),
        p99_ms=_quantile_ms(latencies, 0.99),
        lag_p99_ms=_quantile_ms(lags, 0.99),
        codes={code: count for code, count in sorted(codes.items()) if count},
    )


def name(code: int) -> str:
    """Name a code as a reader knows it."""
    if code == OK:
        return "ok"
    if code >= RESET:
        return f"reset_{code - RESET}"
    if code >= GRPC:
        return GRPC_NAMES.get(code - GRPC, f"grpc_{code - GRPC}")
    return PLAIN_NAMES.get(code, str(code))


def _quantile_ms(ordered: Sequence[float], quantile: float) -> float:
    return round(1000 * ordered[min(int(quantile * len(ordered)), len(ordered) - 1)], 3) if ordered else 0.0
