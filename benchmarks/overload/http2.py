"""One HTTP/2 connection of the generator (prior knowledge): as many requests under way as the server allows."""

import select
import struct

from hpack import Decoder, Encoder

from benchmarks.overload.board import CUT, GRPC, OK, RESET, Board
from benchmarks.overload.sockets import connecting

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
TABLE_SIZE, ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW = 1, 2, 3, 4
LARGEST_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65535
DEFAULT_STREAMS = 100
"""Taken until the server has said how many it allows."""
MOST_UNSENT_BYTES = 2**18
KEPT_BLOCKS = 4096

_HEAD = struct.Struct(">BHBBI")


class Http2Request:
    """A request as frames; only the stream's id differs from one to the next."""

    def __init__(self, headers: list[tuple[str, str]], body: bytes) -> None:
        block = b"".join(Encoder().encode([header], huffman=True) for header in _never_indexed(headers))
        self.size = len(body)
        self._before = _prefix(len(block), HEADERS, END_HEADERS)
        self._between = block + _prefix(len(body), DATA, END_STREAM)
        self._body = body

    def frames(self, stream: int) -> bytes:
        """As sent on one stream."""
        number = stream.to_bytes(4, "big")
        return b"".join((self._before, number, self._between, number, self._body))


class Answers:
    """Reads header blocks. The peer is told to keep no table, so that equal blocks mean the same on any connection."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[int, int | None]] = {}

    def read(self, block: bytes) -> tuple[int, int | None]:
        """The HTTP status (0 in trailers) and the gRPC status, if there is one."""
        known = self._known.get(block)
        if known is None:
            headers = dict(Decoder().decode(block, raw=True))
            grpc_status = headers.get(b"grpc-status")
            known = int(headers.get(b":status", b"0")), None if grpc_status is None else int(grpc_status)
            if len(self._known) >= KEPT_BLOCKS:
                self._known.clear()
            self._known[block] = known
        return known


class Http2Connection:
    """Sends the same request again and again, on a stream each; opens itself anew where the other side has closed.

    Args:
        port: where to, on this machine.
        request: what to send.
        answers: reads the answers' header blocks; may be shared.
        board: told of every answer.
        poll: in which the connection keeps itself registered.
    """

    def __init__(self, port: int, request: Http2Request, answers: Answers, board: Board, poll: "select.epoll") -> None:
        self._port, self._request, self._answers, self._board, self._poll = port, request, answers, board, poll
        self.listed = False
        """Whether the generator has it among those with room."""
        self._streams: dict[int, list[int]] = {}
        """By id: the request's index, the HTTP status and the gRPC status so far."""
        self._unsent, self._received = bytearray(), bytearray()
        self._awaits_writing = self._connected = self._leaving = False
        self._open()

    def fileno(self) -> int:
        """The socket's number, as epoll knows it."""
        return self._socket.fileno()

    @property
    def has_room(self) -> bool:
        """Whether a request can be sent now."""
        return (
            not self._leaving
            and len(self._streams) < self._max_streams
            and self._window >= self._request.size
            and len(self._unsent) < MOST_UNSENT_BYTES
        )

    def send(self, index: int, now: float) -> None:
        """Add a request to what the next flush writes."""
        self._board.begin(index, now)
        self._streams[self._next_stream] = [index, 0, -1]
        self._unsent += self._request.frames(self._next_stream)
        self._window -= self._request.size
        self._next_stream += 2

    def flush(self, now: float) -> None:
        """Write what the socket takes."""
        if not self._unsent or not self._connected:
            return
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._reopen(now)
            return
        del self._unsent[:sent]
        if bool(self._unsent) != self._awaits_writing:
            self._awaits_writing = bool(self._unsent)
            self._poll.modify(self.fileno(), select.EPOLLIN | (select.EPOLLOUT if self._unsent else 0))

    def on_event(self, mask: int, now: float) -> None:
        """Read and write what can be."""
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
        """Close the socket."""
        self._socket.close()

    def _open(self) -> None:
        self._socket = connecting(self._port)
        self._connected = self._leaving = False
        self._awaits_writing = True
        self._poll.register(self.fileno(), select.EPOLLIN | select.EPOLLOUT)
        self._streams = {}
        self._next_stream = 1
        self._max_streams, self._window = DEFAULT_STREAMS, DEFAULT_WINDOW
        self._read_bytes = 0
        self._received = bytearray()
        settings = ((TABLE_SIZE, 0), (ENABLE_PUSH, 0), (INITIAL_WINDOW, LARGEST_WINDOW))
        body = b"".join(struct.pack(">HI", *setting) for setting in settings)
        credit = LARGEST_WINDOW - DEFAULT_WINDOW
        self._unsent = bytearray(PREFACE + _frame(SETTINGS, 0, 0, body) + _window_update(credit))

    def _reopen(self, now: float) -> None:
        self._socket.close()
        for index, _, _ in self._streams.values():
            self._board.end(index, CUT, now)
        self._open()

    def _parse(self, now: float) -> None:
        received, at, size = self._received, 0, len(self._received)
        while size - at >= 9:
            high, low, kind, flags, stream = _HEAD.unpack_from(received, at)
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
        if self._read_bytes > 2**29:
            self._unsent += _window_update(self._read_bytes)
            self._read_bytes = 0

    def _on_headers(self, stream: int, flags: int, block: bytes, now: float) -> None:
        if flags & (PADDED | PRIORITY) or not flags & END_HEADERS:
            raise RuntimeError("the generator reads neither padded, nor prioritised, nor continued header blocks")
        status, grpc_status = self._answers.read(block)
        state = self._streams.get(stream)
        if state is not None:
            state[1] = status or state[1]
            state[2] = state[2] if grpc_status is None else grpc_status
            if flags & END_STREAM:
                self._end(stream, now)

    def _on_control(self, kind: int, flags: int, stream: int, body: bytes, now: float) -> None:
        if kind == SETTINGS and not flags & ACK:
            settings = dict(struct.iter_unpack(">HI", body))
            self._max_streams = settings.get(MAX_STREAMS, LARGEST_WINDOW)
            if settings.get(INITIAL_WINDOW, DEFAULT_WINDOW) < self._request.size:
                raise RuntimeError(f"the server's window is less than one request of {self._request.size} bytes")
            self._unsent += _frame(SETTINGS, ACK, 0, b"")
        elif kind == PING and not flags & ACK:
            self._unsent += _frame(PING, ACK, 0, body)
        elif kind == WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(body, "big")
        elif kind == RST_STREAM:
            self._end(stream, now, RESET + int.from_bytes(body, "big"))
        elif kind == GOAWAY:
            self._leaving = True

    def _end(self, stream: int, now: float, code: int | None = None) -> None:
        state = self._streams.pop(stream, None)
        if state is None:
            return  # the reset that follows an answer given before the request was read
        index, status, grpc_status = state
        if code is None:
            code = GRPC + grpc_status if status == OK and grpc_status > 0 else status
        self._board.end(index, code, now)


def _never_indexed(headers: list[tuple[str, str]]) -> list[tuple[str, str, bool]]:
    """Mark headers as sensitive, which keeps them out of the table: the block then is the same for every request."""
    return [(name, value, True) for name, value in headers]


def _prefix(size: int, kind: int, flags: int) -> bytes:
    return struct.pack(">BHBB", size >> 16, size & 0xFFFF, kind, flags)


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return _prefix(len(body), kind, flags) + stream.to_bytes(4, "big") + body


def _window_update(size: int) -> bytes:
    return _frame(WINDOW_UPDATE, 0, 0, size.to_bytes(4, "big"))
