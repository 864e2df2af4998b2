"""Server-sent events, read as they come. Pure.

Of the format only what streams of answers use is known: `event` and `data`; comments are skipped. A line may end in any
of the three ways, and pieces of the stream may be cut anywhere.
"""

from collections.abc import Iterator

from trimtab_protocol.errors import ProtocolError

MAX_EVENT_BYTES = 2**20


class SseParser:
    """Turns bytes into events, each its kind and its data."""

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._most_bytes = max_bytes
        self._rest = b""
        self._kind = ""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> Iterator[tuple[str, bytes]]:
        """The events that are whole with these bytes; raises ProtocolError for one that is too long."""
        lines = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line:
                self._read(line)
            elif self._data:
                yield self._kind or "message", b"\n".join(self._data)
                self._forget()
            else:
                self._forget()
        if self._size + len(self._rest) > self._most_bytes:
            raise ProtocolError(f"an event has more than {self._most_bytes} bytes")

    def _read(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        self._size += len(line)
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._kind = value.decode(errors="replace")

    def _forget(self) -> None:
        self._kind, self._size = "", 0
        self._data = []
