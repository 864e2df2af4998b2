"""What the door refused by itself, read from its counters. Pure.

A request that reached the router is counted there. What is left are answers Envoy gave of its own accord: those are
requests too, received and refused.
"""

import re
from collections import Counter
from collections.abc import Mapping

from trimtab_pipelines.error_codes import DOOR_REASONS, OVERLOAD

_STAT = re.compile(
    r"^door\.answered\.detail\.(?P<detail>.+)\.status\.(?P<status>\d+)\.reason\.(?P<reason>[^.]*): (?P<count>\d+)$"
)
_CAME_OVER_HTTP2 = re.compile(r"^http\.door\.downstream_rq_http2_total: (\d+)$", re.MULTILINE)
STATS = r"^(door\.answered|http\.door\.downstream_rq_http2_total)"
"""Which of Envoy's counters are read here."""
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
"""Details of streams that were reset before they were a request, so that they have no status."""
_BY_STATUS = {401: "Unauthenticated", 403: "Forbidden", 408: "RequestTimeout", 413: "PayloadTooLarge", 429: OVERLOAD}
_COUNTED_BY_ROUTER = ("via_upstream", "downstream", "response_timeout", "duration_timeout", "upstream_response_timeout")
"""Answers of the router, and requests that were at the router when their caller or the door gave them up."""


def answered_by_envoy(text: str) -> dict[str, int]:
    """Read Envoy's text of `door.answered` counters: how often each status, reason and cause was answered."""
    matches = (_STAT.match(line) for line in text.splitlines())
    return {f"{match['status']} {match['reason']} {match['detail']}": int(match["count"]) for match in matches if match}


def came_over_http2(text: str) -> int:
    """Read from Envoy's text how many requests came over HTTP/2."""
    found = _CAME_OVER_HTTP2.search(text)
    return int(found[1]) if found else 0


def rejections_since(before: Mapping[str, int], now: Mapping[str, int]) -> Mapping[tuple[int, str], int]:
    """How many requests the door refused in between, by (HTTP status, reason); a count that fell began anew."""
    refused: Counter[tuple[int, str]] = Counter()
    for cause, count in now.items():
        known = before.get(cause, 0)
        more = count - known if count >= known else count
        refusal = _refusal(*cause.split(" ", 2))
        if more and refusal is not None:
            refused[refusal] += more
    return refused


def _refusal(written_status: str, reason: str, detail: str) -> tuple[int, str] | None:
    """What was refused with such an answer; None where it was no refusal, or the router counted it."""
    status = int(written_status)
    if detail.startswith(_COUNTED_BY_ROUTER):
        return None
    reason = _BY_RESET.get(detail, reason)
    if reason in DOOR_REASONS:
        return (status if status >= 400 else DOOR_REASONS[reason]), reason
    return (status, _reason(status, detail)) if status >= 400 else None


def _reason(status: int, detail: str) -> str:
    for begin, reason in _BY_DETAIL.items():
        if detail.startswith(begin):
            return reason
    if detail.startswith("upstream_reset") or status == 503:
        return "RouterUnavailable"
    return _BY_STATUS.get(status, "Malformed")
