"""Requests that Envoy rejected itself, read from its counters, and the share that it rejects unread.

The router counts the requests that reach it. Envoy's local replies are requests too, received and refused. In a flood,
reading every request saturates Envoy's thread; rejecting one unread costs half as much. On HTTP/1.1 it saves nothing:
rejecting before the body is read forces a reconnect.
"""

import re
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass

from trimtab_pipelines.request_outcome import OVERLOAD, PROXY_REASONS

_STAT = re.compile(
    r"^proxy\.answered\.detail\.(?P<detail>.+)\.status\.(?P<status>\d+)\.reason\.(?P<reason>[^.]*): (?P<count>\d+)$"
)
_HTTP2_REQUESTS = re.compile(r"^http\.proxy\.downstream_rq_http2_total: (\d+)$", re.MULTILINE)
STATS = r"^(proxy\.answered|http\.proxy\.downstream_rq_http2_total)"  # Envoy counters read here
_BY_DETAIL = {
    "jwt_authn": "Unauthenticated",
    "local_rate_limited": "ClientRateLimited",
    "overload": OVERLOAD,
    "request_headers_too_large": "HeadersTooLarge",
    "request_overall_timeout": "RequestTimeout",
    "request_header_timeout": "RequestTimeout",
    "request_payload_too_large": "PayloadTooLarge",
    "upstream_reset_before_response_started{overflow}": OVERLOAD,
}
_BY_RESET = {
    "http2.header_list_size_too_large": "HeadersTooLarge",
    "http2.invalid.header.field": "Malformed",
    "http2.too_many_headers": "HeadersTooLarge",
}
"""Details of streams that were reset before they became a request, so that they have no status."""
_BY_STATUS = {401: "Unauthenticated", 403: "Forbidden", 408: "RequestTimeout", 413: "PayloadTooLarge", 429: OVERLOAD}
_COUNTED_BY_ROUTER = ("via_upstream", "downstream", "response_timeout", "duration_timeout", "upstream_response_timeout")
"""Responses of the router, and requests at the router that the client or Envoy gave up."""


def parse_local_replies(text: str) -> dict[str, int]:
    matches = (_STAT.match(line) for line in text.splitlines())
    return {f"{match['status']} {match['reason']} {match['detail']}": int(match["count"]) for match in matches if match}


def parse_http2_requests(text: str) -> int:
    match = _HTTP2_REQUESTS.search(text)
    return int(match[1]) if match else 0


def rejections_since(before: Mapping[str, int], now: Mapping[str, int]) -> Mapping[tuple[int, str], int]:
    """Requests that Envoy rejected between two readings, by (HTTP status, reason). Counters may have restarted."""
    rejections: Counter[tuple[int, str]] = Counter()
    for cause, count in now.items():
        earlier = before.get(cause, 0)
        increase = count - earlier if count >= earlier else count
        refusal = _refusal(*cause.split(" ", 2))
        if increase and refusal is not None:
            rejections[refusal] += increase
    return rejections


def _refusal(status_text: str, reason: str, detail: str) -> tuple[int, str] | None:
    """Status and reason of a rejection, None if the response is none, or the router counted it."""
    status = int(status_text)
    if detail.startswith(_COUNTED_BY_ROUTER):
        return None
    reason = _BY_RESET.get(detail, reason)
    if reason in PROXY_REASONS:
        return (status if status >= 400 else PROXY_REASONS[reason]), reason
    return (status, _reason(status, detail)) if status >= 400 else None


def _reason(status: int, detail: str) -> str:
    for prefix, reason in _BY_DETAIL.items():
        if detail.startswith(prefix):
            return reason
    if detail.startswith("upstream_reset") or status == 503:
        return "RouterUnavailable"
    return _BY_STATUS.get(status, "Malformed")


FREE_REJECTIONS_RPS = 500.0  # rejections per second that cost little: below this rate no request is rejected unread
MAX_SHARE = 0.98  # Maximum share rejected unread. The others show when the flood ends.
STEPS = 100
RATE_WINDOW_SECONDS = 1.0  # of which the highest rate counts: low rates are measured while Envoy lags behind


@dataclass(frozen=True, slots=True)
class ProxyCounters:
    """Counters at one moment."""

    now: float
    """Monotonic seconds."""
    responses: int
    """Requests answered by the router."""
    rejections: int
    """Requests rejected by Envoy for lack of capacity, read or unread."""
    requests: int
    """Requests received over HTTP/2."""


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
