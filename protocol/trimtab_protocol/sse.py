"""Server-sent events: `SseParser`, an incremental parser, and the JSON events that are sent.

The parser supports the fields `event` and `data`; comments are skipped. Lines may end in any of the three ways, and
chunks may be split anywhere.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from trimtab_protocol.errors import ProtocolError

MAX_EVENT_BYTES = 2**20


def sse_event(content: Mapping[str, Any]) -> bytes:
    try:
        written = orjson.dumps(content)
    except orjson.JSONEncodeError:  # integers of more than 64 bits, or too deep
        written = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    return b"data: " + written + b"\n\n"


class SseParser:
    """Parses bytes into events, each a kind and data."""

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rest = b""
        self._kind = ""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[tuple[str, bytes]]:
        """Events completed by these bytes; ProtocolError for one that is too long."""
        lines = (self._rest + chunk).replace(b"\r\n", b"\n").split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line:
                self._read(line)
            elif self._data:
                yield self._kind or "message", b"\n".join(self._data)
                self._reset()
            else:
                self._reset()
        if self._size + len(self._rest) > self._max_bytes:
            raise ProtocolError(f"an event has more than {self._max_bytes} bytes")

    def _read(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        self._size += len(line)
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._kind = value.decode(errors="replace")

    def _reset(self) -> None:
        self._kind, self._size = "", 0
        self._data = []
