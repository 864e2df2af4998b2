"""What is told of calls to the administrative port: a line of JSON for each that is no probe and no scrape. Pure.

Who reads load or state again and again, as the adapter does, gets a line an hour; what changes something gets one each
time, and so does what is refused, the same in the same minute counted. Lines hold no query strings and nothing that a
caller could break them with.
"""

import json
from collections import OrderedDict
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from trimtab_pipelines.router_state import READY_PATH
from trimtab_protocol.sanitize import printable

ROUTINE = frozenset({"/v2/health/live", "/v2/health/ready", "/metrics", READY_PATH})
"""What the kubelet and Prometheus ask for, each every few seconds."""
REFUSED_SECONDS, READING_SECONDS = 60.0, 3600.0
"""For how long the same call by the same caller is counted, and not told again."""
MAX_CALLERS = 1024
_TEXT_BYTES = 200


@dataclass(frozen=True, slots=True)
class AdminCall:
    """A call that was answered; the path comes without its query string."""

    method: str
    path: str
    caller: str
    status: int
    by: str = ""
    """Whose key was shown; empty where none was asked for, or none was right."""

    @property
    def changes(self) -> bool:
        """Whether something is different after it."""
        return not self.refused and self.method not in {"GET", "HEAD"}

    @property
    def refused(self) -> bool:
        """Whether it got an error; 503 says how a router is, to who asks for that."""
        return self.status >= 400 and self.status != 503

    @property
    def routine(self) -> bool:
        """Whether it is a probe or a scrape."""
        return not self.refused and self.path.rstrip("/") in ROUTINE


@dataclass(slots=True)
class _Told:
    until: float
    since: int = 0


class AdminAuditLog:
    """Decides what is told. Times are Unix seconds."""

    def __init__(self) -> None:
        self._told: OrderedDict[AdminCall, _Told] = OrderedDict()

    def line(self, call: AdminCall, now: float) -> str | None:
        """The line for a call; None where there is nothing new to tell."""
        if call.routine:
            return None
        call = replace(call, method=printable(call.method, _TEXT_BYTES), path=printable(call.path, _TEXT_BYTES))
        if call.changes:
            return _written(call, now, 0)
        known = self._told.pop(call, None)
        if known is not None and now < known.until:
            known.since += 1
            self._told[call] = known
            return None
        self._told[call] = _Told(now + (REFUSED_SECONDS if call.refused else READING_SECONDS))
        if len(self._told) > MAX_CALLERS:
            self._told.popitem(last=False)
        return _written(call, now, known.since if known else 0)


def _written(call: AdminCall, now: float, since: int) -> str:
    content = {
        "time": datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"),
        "audit": "admin",
        "method": call.method,
        "path": call.path,
        "status": call.status,
        "from": call.caller,
    }
    content |= {"by": call.by} if call.by else {}
    return json.dumps(content | ({"more_since_last_line": since} if since else {}))
