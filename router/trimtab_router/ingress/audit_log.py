"""`AdminAuditLog`: JSON lines for calls to the admin port, except probes and scrapes.

Repeated reads by the same client are logged once an hour, changes each time, and equal refused calls once a minute with
their count. Lines contain no query strings and no control characters.
"""

import json
from collections import OrderedDict
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from trimtab_pipelines.router_state import LIVE_PATH, READY_PATH
from trimtab_protocol.sanitize import printable

ROUTINE = frozenset({LIVE_PATH, READY_PATH, "/v2/health/live", "/v2/health/ready", "/metrics"})
"""Paths that the kubelet and Prometheus read every few seconds."""
REFUSED_SECONDS, READ_SECONDS = 60.0, 3600.0  # equal calls of a client are counted, not logged, so long
MAX_CALLS = 1024
_TEXT_BYTES = 200


@dataclass(frozen=True, slots=True)
class AdminCall:
    """An answered call. The path has no query string."""

    method: str
    path: str
    client: str
    status: int
    by: str = ""
    """Client of the admin key, empty without a valid key."""

    @property
    def changes(self) -> bool:
        return not self.refused and self.method not in {"GET", "HEAD"}

    @property
    def refused(self) -> bool:
        return self.status >= 400 and self.status != 503

    @property
    def routine(self) -> bool:
        return not self.refused and self.path.rstrip("/") in ROUTINE


@dataclass(slots=True)
class _Repeats:
    until: float
    count: int = 0


class AdminAuditLog:
    """Decides which calls are logged. Times are Unix seconds."""

    def __init__(self) -> None:
        self._repeats: OrderedDict[AdminCall, _Repeats] = OrderedDict()

    def line(self, call: AdminCall, now: float) -> str | None:
        if call.routine:
            return None
        call = replace(call, method=printable(call.method, _TEXT_BYTES), path=printable(call.path, _TEXT_BYTES))
        if call.changes:
            return _format_line(call, now, 0)
        repeats = self._repeats.pop(call, None)
        if repeats is not None and now < repeats.until:
            repeats.count += 1
            self._repeats[call] = repeats
            return None
        self._repeats[call] = _Repeats(now + (REFUSED_SECONDS if call.refused else READ_SECONDS))
        if len(self._repeats) > MAX_CALLS:
            self._repeats.popitem(last=False)
        return _format_line(call, now, repeats.count if repeats else 0)


def _format_line(call: AdminCall, now: float, count: int) -> str:
    content = {
        "time": datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"),
        "audit": "admin",
        "method": call.method,
        "path": call.path,
        "status": call.status,
        "from": call.client,
    }
    content |= {"by": call.by} if call.by else {}
    return json.dumps(content | ({"more_since_last_line": count} if count else {}))
