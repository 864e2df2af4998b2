"""`LoadShedder`: share of requests that Envoy rejects before it reads them.

To reject a request for lack of capacity, Envoy first reads it. In a flood that alone saturates its thread, and requests
that could be served wait in sockets too. Rejecting unread costs half as much, so only as many requests are read as can
be served. On HTTP/1.1 early rejection saves nothing: rejecting before the body is read forces a reconnect.
"""

from collections import deque
from dataclasses import dataclass

FREE_REJECTIONS_RPS = 500.0  # rejections per second that cost little: below this rate no request is rejected unread
MAX_SHARE = 0.98  # Maximum share rejected unread. The others show when the flood ends.
STEPS = 100
RATE_WINDOW_SECONDS = 1.0
"""Interval whose highest response rate determines how many requests are read.

Responses come in batches, and a low rate measured while Envoy lags behind would keep it low.
"""


@dataclass(frozen=True, slots=True)
class ProxyCounters:
    """Counters at one moment."""

    now: float  # monotonic seconds
    responses: int  # requests answered by the router
    rejections: int  # requests rejected by Envoy for lack of capacity, read or unread
    requests: int  # requests received over HTTP/2


class LoadShedder:
    """Share of requests to reject, from the changes of the counters."""

    def __init__(self, first: ProxyCounters) -> None:
        self._previous = first
        self._rates: deque[tuple[float, float]] = deque()  # (time, responses per second) of recent measurements

    def share(self, counters: ProxyCounters) -> float:
        """Share of all requests to reject unread, 0 to `MAX_SHARE`."""
        previous, self._previous = self._previous, counters
        seconds = counters.now - previous.now
        if seconds <= 0:
            return 0.0
        rejected_rps = (counters.rejections - previous.rejections) / seconds
        received_rps = (counters.requests - previous.requests) / seconds
        read_rps = (
            self._highest_rps(counters.now, (counters.responses - previous.responses) / seconds) + FREE_REJECTIONS_RPS
        )
        if rejected_rps <= FREE_REJECTIONS_RPS or received_rps <= read_rps:
            return 0.0
        return min(round((1.0 - read_rps / received_rps) * STEPS) / STEPS, MAX_SHARE)

    def _highest_rps(self, now: float, response_rps: float) -> float:
        self._rates.append((now, response_rps))
        while self._rates[0][0] <= now - RATE_WINDOW_SECONDS:
            self._rates.popleft()
        return max(rps for _, rps in self._rates)
