"""Connections of the load generator: HTTP/1.1 and HTTP/2 over non-blocking sockets, each sends one prepared request.

Neither asyncio nor a client library reaches 30,000 requests per second on one core; prepared bytes do.
"""

import select
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress

from hpack import Decoder, Encoder

from benchmarks.overload.outcomes import CONNECTION_CLOSED, GRPC, OK, RESET, Outcomes

HEAD_END, CHUNKS_END, LENGTH = b"\r\n\r\n", b"0\r\n\r\n", b"content-length:"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
TABLE_SIZE, MAX_STREAMS, INITIAL_WINDOW = 1, 3, 4
MAX_WINDOW, DEFAULT_WINDOW, DEFAULT_STREAMS = 2**31 - 1, 65535, 100
WINDOW_REFILL_BYTES = 2**29
MAX_UNSENT_BYTES = 2**18
MAX_CACHED_BLOCKS = 4096
_FRAME_HEAD = struct.Struct(">BHBBI")


class Connection(ABC):
    """A connection that reopens when the server closes it. It registers itself in the poll."""

    def __init__(self, port: int, outcomes: Outcomes, poll: "select.epoll") -> None:
        self._port, self._outcomes, self._poll = port, outcomes, poll
        self.listed = False
        """Whether the generator lists it among the connections with capacity."""
        self._connected, self._awaits_writable = False, True
        self._unsent, self._received = bytearray(), bytearray()
        self._open()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    @abstractmethod
    def has_capacity(self) -> bool:
        """Whether a request can be sent now."""

    @abstractmethod
    def send(self, index: int, now: float) -> None:
        """Append the request to the bytes that the next flush writes."""

    @abstractmethod
    def _start(self) -> None:
        """Reset the protocol's state for a new socket."""

    @abstractmethod
    def _parse(self, now: float) -> None:
        """Consume whole messages of `_received`."""

    @abstractmethod
    def _indexes_in_flight(self) -> Sequence[int]: ...

    def flush(self, now: float) -> None:
        if not self._connected:
            return
        if self._unsent:
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                pass
            except OSError:
                self._reopen(now)
                return
        if bool(self._unsent) != self._awaits_writable:
            self._awaits_writable = bool(self._unsent)
            self._poll.modify(self.fileno(), select.EPOLLIN | (select.EPOLLOUT if self._unsent else 0))

    def on_event(self, mask: int, now: float) -> None:
        self._connected = True
        if mask & ~select.EPOLLOUT:
            try:
                data = self._socket.recv(2**18)
            except BlockingIOError:
                data = None
            except OSError:
                data = b""
            if data == b"":
                self._reopen(now)
                return
            if data:
                self._received += data
                self._parse(now)
        self.flush(now)

    def close(self) -> None:
        self._socket.close()

    def _open(self) -> None:
        self._socket = socket.socket()
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(BlockingIOError):
            self._socket.connect(("127.0.0.1", self._port))
        self._connected, self._awaits_writable = False, True
        self._poll.register(self.fileno(), select.EPOLLIN | select.EPOLLOUT)
        self._unsent, self._received = bytearray(), bytearray()
        self._start()

    def _reopen(self, now: float) -> None:
        self._socket.close()
        for index in self._indexes_in_flight():
            self._outcomes.end(index, CONNECTION_CLOSED, now)
        self._open()


class Http1Connection(Connection):
    """Keep-alive HTTP/1.1 connection, with one request in flight; the request is whole bytes."""

    def __init__(self, port: int, request: bytes, outcomes: Outcomes, poll: "select.epoll") -> None:
        self._request = request
        self._index: int | None = None
        super().__init__(port, outcomes, poll)

    @property
    def has_capacity(self) -> bool:
        return self._connected and self._index is None

    def send(self, index: int, now: float) -> None:
        self._index = index
        self._outcomes.begin(index, now)
        self._unsent += self._request

    def _start(self) -> None:
        self._index = None

    def _indexes_in_flight(self) -> Sequence[int]:
        return () if self._index is None else (self._index,)

    def _parse(self, now: float) -> None:
        head_end = self._received.find(HEAD_END)
        if head_end < 0:
            return
        head = bytes(self._received[:head_end]).lower()
        if not self._is_complete(head, head_end + len(HEAD_END)):
            return
        self._received.clear()
        index, self._index = self._index, None
        if index is not None:
            self._outcomes.end(index, int(head[9:12]), now)
        if self._unsent or b"connection: close" in head:
            self._reopen(now)

    def _is_complete(self, head: bytes, body_begin: int) -> bool:
        at = head.find(LENGTH)
        if at < 0:
            return self._received.endswith(CHUNKS_END)
        length = head[at + len(LENGTH) :].partition(b"\r\n")[0]
        return len(self._received) - body_begin >= int(length)


class Http2Request:
    """A request as frames; only the stream's number differs between two of them."""

    def __init__(self, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        # Sensitive headers stay out of the compression table, so that the block is the same for every request.
        sensitive = [(name, value, True) for name, value in headers]
        block = b"".join(Encoder().encode([header], huffman=True) for header in sensitive)
        self.size = len(body)
        self._before = _frame_head(len(block), HEADERS, END_HEADERS)
        self._between = block + _frame_head(len(body), DATA, END_STREAM)
        self._body = body

    def frames(self, stream: int) -> bytes:
        number = stream.to_bytes(4, "big")
        return b"".join((self._before, number, self._between, number, self._body))


class ResponseHeaders:
    """Decoder of header blocks with a cache: the peer may keep no table, so equal blocks mean the same."""

    def __init__(self) -> None:
        self._cache: dict[bytes, tuple[int, int | None]] = {}

    def decode(self, block: bytes) -> tuple[int, int | None]:
        """Return the HTTP status (0 in trailers) and the gRPC status, if there is one."""
        statuses = self._cache.get(block)
        if statuses is None:
            headers = dict(Decoder().decode(block, raw=True))
            grpc_status = headers.get(b"grpc-status")
            statuses = int(headers.get(b":status", b"0")), None if grpc_status is None else int(grpc_status)
            if len(self._cache) >= MAX_CACHED_BLOCKS:
                self._cache.clear()
            self._cache[block] = statuses
        return statuses


class Http2Connection(Connection):
    """HTTP/2 connection by prior knowledge, with as many requests in flight as the server allows.

    Connections may share the decoder of response headers.
    """

    def __init__(
        self, port: int, request: Http2Request, headers: ResponseHeaders, outcomes: Outcomes, poll: "select.epoll"
    ) -> None:
        self._request, self._headers = request, headers
        super().__init__(port, outcomes, poll)

    @property
    def has_capacity(self) -> bool:
        return (
            not self._going_away
            and len(self._streams) < self._max_streams
            and self._window >= self._request.size
            and len(self._unsent) < MAX_UNSENT_BYTES
        )

    def send(self, index: int, now: float) -> None:
        self._outcomes.begin(index, now)
        self._streams[self._next_stream] = [index, 0, -1]
        self._unsent += self._request.frames(self._next_stream)
        self._window -= self._request.size
        self._next_stream += 2

    def _start(self) -> None:
        self._going_away = False
        self._streams: dict[int, list[int]] = {}
        """Of each stream the request's index, the HTTP status and the gRPC status."""
        self._next_stream = 1
        self._max_streams, self._window = DEFAULT_STREAMS, DEFAULT_WINDOW
        self._read_bytes = 0
        settings = b"".join(struct.pack(">HI", *pair) for pair in ((TABLE_SIZE, 0), (INITIAL_WINDOW, MAX_WINDOW)))
        self._unsent += PREFACE + _frame(SETTINGS, 0, settings) + _window_update(MAX_WINDOW - DEFAULT_WINDOW)

    def _indexes_in_flight(self) -> Sequence[int]:
        return [index for index, _, _ in self._streams.values()]

    def _parse(self, now: float) -> None:
        received, at, size = self._received, 0, len(self._received)
        while size - at >= 9:
            high, low, kind, flags, stream = _FRAME_HEAD.unpack_from(received, at)
            end = at + 9 + (high << 16 | low)
            if end > size:
                break
            if kind == DATA:
                self._read_bytes += end - at - 9
                if flags & END_STREAM:
                    self._end(stream, now)
            elif kind == HEADERS:
                self._on_headers(stream, flags, bytes(received[at + 9 : end]), now)
            else:
                self._on_control(kind, flags, stream, bytes(received[at + 9 : end]), now)
            at = end
        del received[:at]
        if self._read_bytes > WINDOW_REFILL_BYTES:
            self._unsent += _window_update(self._read_bytes)
            self._read_bytes = 0

    def _on_headers(self, stream: int, flags: int, block: bytes, now: float) -> None:
        if flags & (PADDED | PRIORITY) or not flags & END_HEADERS:
            raise RuntimeError("the generator reads neither padded, nor prioritised, nor continued header blocks")
        status, grpc_status = self._headers.decode(block)
        state = self._streams.get(stream)
        if state is not None:
            state[1] = status or state[1]
            state[2] = state[2] if grpc_status is None else grpc_status
            if flags & END_STREAM:
                self._end(stream, now)

    def _on_control(self, kind: int, flags: int, stream: int, body: bytes, now: float) -> None:
        if kind == SETTINGS and not flags & ACK:
            settings = dict(struct.iter_unpack(">HI", body))
            self._max_streams = settings.get(MAX_STREAMS, MAX_WINDOW)
            if settings.get(INITIAL_WINDOW, DEFAULT_WINDOW) < self._request.size:
                raise RuntimeError(f"the server's window is less than one request of {self._request.size} bytes")
            self._unsent += _frame(SETTINGS, ACK, b"")
        elif kind == PING and not flags & ACK:
            self._unsent += _frame(PING, ACK, body)
        elif kind == WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(body, "big")
        elif kind == RST_STREAM:
            self._end(stream, now, RESET + int.from_bytes(body, "big"))
        elif kind == GOAWAY:
            self._going_away = True

    def _end(self, stream: int, now: float, code: int | None = None) -> None:
        state = self._streams.pop(stream, None)
        if state is None:
            return  # the reset that follows a response sent before the request was read
        index, status, grpc_status = state
        if code is None:
            code = GRPC + grpc_status if status == OK and grpc_status > 0 else status
        self._outcomes.end(index, code, now)


def _frame_head(size: int, kind: int, flags: int) -> bytes:
    return struct.pack(">BHBB", size >> 16, size & 0xFFFF, kind, flags)


def _frame(kind: int, flags: int, body: bytes) -> bytes:
    """Return a frame of stream 0."""
    return _frame_head(len(body), kind, flags) + bytes(4) + body


def _window_update(size: int) -> bytes:
    return _frame(WINDOW_UPDATE, 0, size.to_bytes(4, "big"))
