"""What the door refused by itself, read from its counters. Pure.

A request that reached the router is counted there. What is left are answers Envoy gave of its own accord: those are
requests too, received and refused.
"""

import re
from collections import Counter
from collections.abc import Mapping

_STAT = re.compile(r"^door\.answered\.detail\.(?P<detail>.+)\.status\.(?P<status>\d+): (?P<count>\d+)$")
_REASONS = {
    "jwt_authn": "Unauthenticated",
    "local_rate_limited": "ClientRate",
    "overload": "DoorFull",
    "request_headers_too_large": "HeadersTooLarge",
    "request_overall_timeout": "RequestTimeout",
    "request_header_timeout": "RequestTimeout",
    "request_payload_too_large": "PayloadTooLarge",
    "upstream_reset_before_response_started{overflow}": "Overload",
}
_BY_STATUS = {401: "Unauthenticated", 403: "Forbidden", 408: "RequestTimeout", 413: "PayloadTooLarge", 429: "Overload"}
_COUNTED_BY_ROUTER = ("via_upstream", "downstream", "response_timeout", "duration_timeout", "upstream_response_timeout")
"""Answers of the router, and requests that were at the router when their caller or the door gave them up."""
_MALFORMED = "Malformed"


def answered(text: str) -> dict[str, int]:
    """Read Envoy's text of `door.answered` counters: how often each cause and status was answered."""
    matches = (_STAT.match(line) for line in text.splitlines())
    return {f"{match['status']} {match['detail']}": int(match["count"]) for match in matches if match}


def refused_since(before: Mapping[str, int], now: Mapping[str, int]) -> Mapping[tuple[int, str], int]:
    """How many requests the door refused in between, by (HTTP status, reason); a count that fell began anew."""
    refused: Counter[tuple[int, str]] = Counter()
    for cause, count in now.items():
        written_status, _, detail = cause.partition(" ")
        status, known = int(written_status), before.get(cause, 0)
        more = count - known if count >= known else count
        if more and status >= 400 and not detail.startswith(_COUNTED_BY_ROUTER):
            refused[status, _reason(status, detail)] += more
    return refused


def _reason(status: int, detail: str) -> str:
    for begin, reason in _REASONS.items():
        if detail.startswith(begin):
            return reason
    if detail.startswith("upstream_reset") or status == 503:
        return "RouterAway"
    return _BY_STATUS.get(status, _MALFORMED)
