"""HTTP/2 as gRPC needs it: unary calls over plain-text connections, straight on the event loop.

The general gRPC server spends several times more processor time on a call than everything else in the router
together, takes a call in before anybody can refuse it, and under overload keeps a backlog that no deadline sees. Here a
call costs little, and one that cannot be served is refused as soon as its first bytes tell its size. Frames follow
RFC 9113, header compression is the `hpack` package's.
"""

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import cast

from hpack import Decoder
from hpack.exceptions import HPACKError

from trimtab_protocol import Buffer
from trimtab_router.ingress import frames

log = logging.getLogger(__name__)

MAX_STREAMS = 4096
MAX_FRAME_BYTES = 256 * 1024
MAX_HEADER_BYTES = 64 * 1024
STREAM_WINDOW_BYTES = 4 * 2**20
CONNECTION_WINDOW_BYTES = 16 * 2**20
MAX_RESETS, RESET_SECONDS = 10_000, 10.0
MAX_KNOWN_BLOCKS = 64
MESSAGE_PREFIX_BYTES = 5
WRITE_BUFFER_BYTES = 8 * 2**20

Metadata = Sequence[tuple[str, str]]


class Http2Error(Exception):
    """The other side breaks HTTP/2: the connection ends with this code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class UnaryCall:
    """One call: its path, its metadata, and its message as sent (compressed where `compressed`)."""

    path: str
    metadata: Mapping[str, str]
    message: Buffer
    compressed: bool


@dataclass(frozen=True, slots=True)
class UnaryAnswer:
    """Status by number (0 is OK), a message for people, trailing metadata, and the answer where there is one."""

    status: int
    details: str = ""
    trailing: Metadata = ()
    message: bytes | None = None


Handler = Callable[[UnaryCall], Awaitable[UnaryAnswer]]
Reserve = Callable[[int], AbstractContextManager[None] | UnaryAnswer]
"""Asked with a message's size before it is received: room for it, held until it is answered, or the refusal."""


@dataclass(slots=True, eq=False)
class _Stream:
    number: int
    headers: dict[str, str]
    window: int
    body: bytearray = field(default_factory=bytearray)
    expected: int = -1
    received_unacknowledged: int = 0
    room: AbstractContextManager[None] | None = None
    task: "asyncio.Task[None] | None" = None
    pending: deque[memoryview] = field(default_factory=deque)
    trailers: bytes = b""
    answered: bool = False


class Http2Connection(asyncio.Protocol):
    """The server's side of one connection.

    Args:
        handler: answers a call whose message has arrived; cancelled when the caller leaves.
        reserve: room for a message of a size, or a refusal.
        connections: the server's open connections; this one is in it while it is open.
    """

    def __init__(self, handler: Handler, reserve: Reserve, connections: "set[Http2Connection]") -> None:
        self._handler = handler
        self._reserve = reserve
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._decoder = Decoder(MAX_HEADER_BYTES)
        self._known_blocks: dict[bytes, dict[str, str]] = {}
        self._buffer = bytearray()
        self._greeted = False
        self._streams: dict[int, _Stream] = {}
        self._last_stream = 0
        self._block = bytearray()
        self._block_stream = 0
        self._block_ends_stream = False
        self._window = frames.DEFAULT_WINDOW_BYTES
        self._initial_window = frames.DEFAULT_WINDOW_BYTES
        self._frame_bytes = frames.DEFAULT_FRAME_BYTES
        self._unacknowledged = 0
        self._resets = 0
        self._resets_since = self._loop.time()
        self._closing = False
        self._writable = True
        self._acts: dict[int, Callable[[int, int, memoryview], None]] = {
            frames.DATA: self._on_data,
            frames.HEADERS: self._on_headers,
            frames.CONTINUATION: self._on_continuation,
            frames.WINDOW_UPDATE: self._on_window_update,
            frames.PING: self._on_ping,
            frames.SETTINGS: self._on_settings,
            frames.RST_STREAM: self._on_reset,
            frames.PUSH_PROMISE: self._on_push,
        }

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say what we accept."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        self._connections.add(self)
        settings = struct.pack(
            ">HIHIHIHI",
            *(frames.SETTING_MAX_STREAMS, MAX_STREAMS, frames.SETTING_WINDOW, STREAM_WINDOW_BYTES),
            *(frames.SETTING_FRAME_SIZE, MAX_FRAME_BYTES, frames.SETTING_HEADER_LIST, MAX_HEADER_BYTES),
        )
        self._write(frames.frame(frames.SETTINGS, 0, 0, settings))
        self._write(frames.window_update(0, CONNECTION_WINDOW_BYTES - frames.DEFAULT_WINDOW_BYTES))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - every loss is the same here
        """Leave all calls."""
        self._connections.discard(self)
        self._closing = True
        for stream in list(self._streams.values()):
            self._forget(stream)

    def data_received(self, data: bytes) -> None:
        """Handle the frames that are complete."""
        self._buffer += data
        try:
            self._read_frames()
        except Http2Error as error:
            log.info("a connection broke HTTP/2: %s", error)
            self._go_away(error.code, str(error))
            if self._transport is not None:
                self._transport.close()

    def pause_writing(self) -> None:
        """The other side reads too slowly: answers wait."""
        self._writable = False

    def resume_writing(self) -> None:
        """The other side reads again."""
        self._writable = True
        self._send_pending()

    def drain(self) -> None:
        """Take no new calls; close once those under way are answered."""
        if not self._closing:
            self._closing = True
            self._go_away(frames.NO_ERROR, "shutting down")
        self._close_if_done()

    def close(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def _read_frames(self) -> None:
        buffer = self._buffer
        if not self._greeted:
            if not frames.PREFACE.startswith(buffer[: len(frames.PREFACE)]):
                raise Http2Error(frames.PROTOCOL_ERROR, "no HTTP/2 connection preface")
            if len(buffer) < len(frames.PREFACE):
                return
            self._greeted = True
            del buffer[: len(frames.PREFACE)]
        begin, filled = 0, len(buffer)
        view = memoryview(buffer)
        try:
            while filled - begin >= 9:
                high, low, kind, flags, stream = frames.FRAME_HEAD.unpack_from(buffer, begin)
                length = high << 8 | low
                if length > MAX_FRAME_BYTES:
                    raise Http2Error(frames.FRAME_SIZE_ERROR, f"a frame of {length} bytes; at most {MAX_FRAME_BYTES}")
                end = begin + 9 + length
                if end > filled:
                    break
                self._handle(kind, flags, stream & 0x7FFFFFFF, view[begin + 9 : end])
                begin = end
        finally:
            view.release()
        del buffer[:begin]

    def _handle(self, kind: int, flags: int, number: int, payload: memoryview) -> None:
        if self._block_stream and (kind != frames.CONTINUATION or number != self._block_stream):
            raise Http2Error(frames.PROTOCOL_ERROR, "a header block was interrupted")
        act = self._acts.get(kind)
        if act is not None:  # frames of other kinds, PRIORITY and frames.GOAWAY among them, concern nobody here
            act(flags, number, payload)

    def _on_headers(self, flags: int, number: int, payload: memoryview) -> None:
        payload = _unpadded(flags, payload)
        if flags & frames.WITH_PRIORITY:
            payload = payload[5:]
        begins = number % 2 == 1 and number > self._last_stream
        if not begins and (
            number not in self._streams or not flags & frames.END_STREAM
        ):  # a caller's trailers end its stream
            raise Http2Error(frames.PROTOCOL_ERROR, f"stream {number} cannot begin")
        self._block_stream = number
        self._block_ends_stream = bool(flags & frames.END_STREAM)
        self._on_block(flags, payload)

    def _on_continuation(self, flags: int, _: int, payload: memoryview) -> None:
        if not self._block_stream:
            raise Http2Error(frames.PROTOCOL_ERROR, "frames.CONTINUATION without frames.HEADERS")
        self._on_block(flags, payload)

    def _on_push(self, _: int, __: int, ___: memoryview) -> None:
        raise Http2Error(frames.PROTOCOL_ERROR, "clients do not push")

    def _on_block(self, flags: int, payload: memoryview) -> None:
        self._block += payload
        if len(self._block) > MAX_HEADER_BYTES:
            raise Http2Error(frames.ENHANCE_YOUR_CALM, f"more than {MAX_HEADER_BYTES} bytes of headers")
        if not flags & frames.END_HEADERS:
            return
        number, block = self._block_stream, bytes(self._block)
        self._block_stream = 0
        self._block.clear()
        headers = self._decode(block)
        stream = self._streams.get(number)
        if stream is None:
            stream = self._begin(number, headers)
        if stream is not None and self._block_ends_stream:
            self._message_ended(stream)

    def _decode(self, block: bytes) -> dict[str, str]:
        """Decode a header block. One that only names entries of the table means the same until the table changes."""
        indexed = min(block, default=0) > 0x80 and max(block) < 0xFF
        if indexed and (known := self._known_blocks.get(block)) is not None:
            return known
        try:
            headers = {str(name): str(value) for name, value in self._decoder.decode(block)}
        except (HPACKError, UnicodeDecodeError) as error:
            raise Http2Error(frames.COMPRESSION_ERROR, f"headers cannot be decoded: {error}") from error
        if indexed and len(self._known_blocks) < MAX_KNOWN_BLOCKS:
            self._known_blocks[block] = headers
        elif not indexed:
            self._known_blocks.clear()
        return headers

    def _begin(self, number: int, headers: dict[str, str]) -> _Stream | None:
        self._last_stream = number
        if self._closing or len(self._streams) >= MAX_STREAMS:
            self._write(frames.reset(number, frames.REFUSED_STREAM))
            return None
        stream = self._streams[number] = _Stream(number, headers, self._initial_window)
        return stream

    def _on_data(self, flags: int, number: int, payload: memoryview) -> None:
        size = len(payload)
        self._unacknowledged += size
        if self._unacknowledged > CONNECTION_WINDOW_BYTES:
            raise Http2Error(frames.FLOW_CONTROL_ERROR, "more data than the connection's window allows")
        if self._unacknowledged > CONNECTION_WINDOW_BYTES // 4:
            self._write(frames.window_update(0, self._unacknowledged))
            self._unacknowledged = 0
        stream = self._streams.get(number)
        if stream is None:
            if number > self._last_stream or number == 0:
                raise Http2Error(frames.PROTOCOL_ERROR, f"data on stream {number}, which never began")
            return  # what was still on its way when we answered
        ends = bool(flags & frames.END_STREAM)
        self._receive(stream, _unpadded(flags, payload), size, ends=ends)
        if ends and stream.number in self._streams:
            self._message_ended(stream)

    def _receive(self, stream: _Stream, payload: memoryview, size: int, *, ends: bool) -> None:
        if stream.answered:
            return
        stream.body += payload
        if stream.expected < 0 and len(stream.body) >= MESSAGE_PREFIX_BYTES:
            stream.expected = MESSAGE_PREFIX_BYTES + int.from_bytes(stream.body[1:MESSAGE_PREFIX_BYTES], "big")
            room = self._reserve(stream.expected - MESSAGE_PREFIX_BYTES)
            if isinstance(room, UnaryAnswer):
                self._turn_away(stream, room, ends=ends)
                return
            room.__enter__()
            stream.room = room
        if 0 <= stream.expected < len(stream.body):
            self._turn_away(stream, _NOT_ONE_MESSAGE, ends=ends)
            return
        stream.received_unacknowledged += size
        if not ends and stream.received_unacknowledged > STREAM_WINDOW_BYTES // 4:
            self._write(frames.window_update(stream.number, stream.received_unacknowledged))
            stream.received_unacknowledged = 0

    def _turn_away(self, stream: _Stream, answer: UnaryAnswer, *, ends: bool) -> None:
        """Answer before all is received; the rest need not be sent."""
        self._answer(stream, answer)
        if not ends:
            self._write(frames.reset(stream.number, frames.NO_ERROR))

    def _message_ended(self, stream: _Stream) -> None:
        if stream.answered or stream.task is not None:
            return
        if len(stream.body) != stream.expected:
            self._answer(stream, _NOT_ONE_MESSAGE)
            return
        call = UnaryCall(
            path=stream.headers.get(":path", ""),
            metadata=stream.headers,
            message=memoryview(stream.body)[MESSAGE_PREFIX_BYTES:],
            compressed=bool(stream.body[0]),
        )
        stream.task = self._loop.create_task(self._serve(stream, call))

    async def _serve(self, stream: _Stream, call: UnaryCall) -> None:
        answer = await self._handler(call)
        stream.task = None
        if stream.number in self._streams:
            self._answer(stream, answer)

    def _answer(self, stream: _Stream, answer: UnaryAnswer) -> None:
        stream.answered = True
        stream.trailers = _trailers(answer)
        if answer.message is None:
            self._write(
                frames.frame(
                    frames.HEADERS,
                    frames.END_HEADERS | frames.END_STREAM,
                    stream.number,
                    _ANSWER_HEADERS + stream.trailers,
                )
            )
            self._forget(stream)
            return
        prefix = b"\x00" + len(answer.message).to_bytes(4, "big")
        stream.pending.append(memoryview(prefix + answer.message))
        self._write(frames.frame(frames.HEADERS, frames.END_HEADERS, stream.number, _ANSWER_HEADERS))
        self._send(stream)

    def _send(self, stream: _Stream) -> None:
        """Send what the windows allow; the trailers once all is sent."""
        while stream.pending and self._writable:
            room = min(self._window, stream.window, self._frame_bytes)
            if room <= 0:
                return
            piece = stream.pending[0][:room]
            rest = stream.pending[0][room:]
            if rest:
                stream.pending[0] = rest
            else:
                stream.pending.popleft()
            self._window -= len(piece)
            stream.window -= len(piece)
            self._write(frames.frame_head(frames.DATA, 0, stream.number, len(piece)))
            self._write(piece)
        if not stream.pending:
            self._write(
                frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream.number, stream.trailers)
            )
            self._forget(stream)

    def _send_pending(self) -> None:
        for stream in list(self._streams.values()):
            if stream.answered:
                self._send(stream)

    def _forget(self, stream: _Stream) -> None:
        self._streams.pop(stream.number, None)
        if stream.task is not None:
            stream.task.cancel()
        if stream.room is not None:
            stream.room.__exit__(None, None, None)
            stream.room = None
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._closing and not self._streams and self._transport is not None:
            self._transport.close()

    def _on_reset(self, _: int, number: int, __: memoryview) -> None:
        if number == 0 or number > self._last_stream:
            raise Http2Error(frames.PROTOCOL_ERROR, f"reset of stream {number}, which never began")
        stream = self._streams.get(number)
        if stream is None:
            return
        self._forget(stream)
        now = self._loop.time()
        if now - self._resets_since > RESET_SECONDS:
            self._resets, self._resets_since = 0, now
        self._resets += 1
        if self._resets > MAX_RESETS:
            raise Http2Error(frames.ENHANCE_YOUR_CALM, "too many calls were begun and cancelled")

    def _on_window_update(self, _: int, number: int, payload: memoryview) -> None:
        if len(payload) != 4:
            raise Http2Error(frames.FRAME_SIZE_ERROR, "frames.WINDOW_UPDATE has 4 bytes")
        increment = int.from_bytes(payload, "big") & 0x7FFFFFFF
        stream = self._streams.get(number)
        if number == 0:
            self._window += increment
            self._send_pending()
        elif stream is not None:
            stream.window += increment
            if stream.answered:
                self._send(stream)
        if increment == 0 or max(self._window, stream.window if stream else 0) > frames.MAX_WINDOW_BYTES:
            raise Http2Error(frames.FLOW_CONTROL_ERROR, f"a window was widened by {increment}")

    def _on_ping(self, flags: int, _: int, payload: memoryview) -> None:
        if len(payload) != 8:
            raise Http2Error(frames.FRAME_SIZE_ERROR, "frames.PING has 8 bytes")
        if not flags & frames.ACK:
            self._write(frames.frame(frames.PING, frames.ACK, 0, bytes(payload)))

    def _on_settings(self, flags: int, _: int, payload: memoryview) -> None:
        if flags & frames.ACK:
            return
        if len(payload) % 6:
            raise Http2Error(frames.FRAME_SIZE_ERROR, "frames.SETTINGS come in 6 bytes each")
        for name, setting in struct.iter_unpack(">HI", payload):
            if name == frames.SETTING_WINDOW:
                if setting > frames.MAX_WINDOW_BYTES:
                    raise Http2Error(frames.FLOW_CONTROL_ERROR, f"a window of {setting} bytes")
                for stream in self._streams.values():
                    stream.window += setting - self._initial_window
                self._initial_window = setting
            elif name == frames.SETTING_FRAME_SIZE:
                if not frames.DEFAULT_FRAME_BYTES <= setting < 2**24:
                    raise Http2Error(frames.PROTOCOL_ERROR, f"frames of {setting} bytes")
                self._frame_bytes = min(setting, MAX_FRAME_BYTES)
        self._write(frames.frame(frames.SETTINGS, frames.ACK, 0, b""))
        self._send_pending()

    def _go_away(self, code: int, message: str) -> None:
        payload = self._last_stream.to_bytes(4, "big") + code.to_bytes(4, "big") + message.encode()
        self._write(frames.frame(frames.GOAWAY, 0, 0, payload))

    def _write(self, data: Buffer) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


def _unpadded(flags: int, payload: memoryview) -> memoryview:
    if not flags & frames.PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise Http2Error(frames.PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]


def _trailers(answer: UnaryAnswer) -> bytes:
    if answer.status == 0 and not answer.trailing:
        return _TRAILERS_OK
    fields = [("grpc-status", str(answer.status)), *answer.trailing]
    if answer.details:
        fields.insert(1, ("grpc-message", frames.percent_encoded(answer.details)))
    return b"".join(frames.literal(name, value) for name, value in fields)


_NOT_ONE_MESSAGE = UnaryAnswer(3, "a unary call carries exactly one message with its length before it")
_STATUS_200 = b"\x88"  # entry 8 of the static table (RFC 7541, appendix A)
_ANSWER_HEADERS = _STATUS_200 + frames.literal("content-type", "application/grpc")
_TRAILERS_OK = frames.literal("grpc-status", "0")
