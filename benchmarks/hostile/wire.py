"""A connection that sends anything, keeps all it gets, and never raises for what the other side does."""

import asyncio
import itertools
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from benchmarks.hostile.kinds import CUT, HTTP2, NOTHING

PATIENCE_SECONDS = 6.0
"""How long a caller waits for a word where nothing delays one."""
CUT_WITHIN_SECONDS = 20.0
"""How long a caller that dawdles may be borne with."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
Place = int | Path
"""A port of this machine, or a Unix socket."""
_LINGER_NOT = struct.pack("ii", 1, 0)


class Wire(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.closed = False
        self._changed = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.Transport

    @classmethod
    async def open(cls, place: Place) -> "Wire":
        """Connect to a port of loopback, or to a Unix socket."""
        loop = asyncio.get_running_loop()
        if isinstance(place, Path):
            _, wire = await loop.create_unix_connection(cls, str(place))
        else:
            _, wire = await loop.create_connection(cls, "127.0.0.1", place)
        return wire

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        if not isinstance(transport, asyncio.Transport):
            raise TypeError(f"{transport!r} does not read and write")
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Keep what came."""
        self.received += data
        self._changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end, however it came."""
        del exc
        self.closed = True
        self._changed.set()
        self._writable.set()

    def pause_writing(self) -> None:
        """Wait in `send` until the other side reads."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Go on."""
        self._writable.set()

    async def send(self, data: bytes, patience_seconds: float = PATIENCE_SECONDS) -> bool:
        """Send; False where the connection has ended, or nobody reads for so long."""
        if self.closed or self._transport.is_closing():
            return False
        self._transport.write(data)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._writable.wait(), patience_seconds)
        return self._writable.is_set() and not self.closed

    async def until(self, holds: Callable[[], bool], patience_seconds: float = PATIENCE_SECONDS) -> bool:
        """Wait until it holds; looked at whenever something comes. False once the connection or the patience ended."""
        give_up = time.monotonic() + patience_seconds
        while not holds():
            if self.closed or time.monotonic() >= give_up:
                return False
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), give_up - time.monotonic())
        return True

    def stop_reading(self) -> None:
        """Take nothing more from the network."""
        self._transport.pause_reading()

    def read_on(self) -> None:
        """Take what comes again."""
        if not self.closed:
            self._transport.resume_reading()

    def send_end(self) -> None:
        """Say that nothing more will be sent, and go on reading."""
        with suppress(OSError, NotImplementedError):
            self._transport.write_eof()

    def close(self, *, abruptly: bool = False) -> None:
        """Close; abruptly with a TCP reset."""
        if abruptly and (peer := self._transport.get_extra_info("socket")) is not None:
            with suppress(OSError):
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        self._transport.abort()


@asynccontextmanager
async def connected(place: Place) -> AsyncIterator[Wire]:
    """A connection that is closed afterwards."""
    wire = await Wire.open(place)
    try:
        yield wire
    finally:
        wire.close()


async def reply(wire: Wire, patience_seconds: float = PATIENCE_SECONDS) -> str:
    """Wait for the next HTTP/1.1 answer's status and take its head off; `cut` or `nothing` where none comes."""
    while await wire.until(lambda: b"\r\n\r\n" in wire.received, patience_seconds):
        head, _, rest = bytes(wire.received).partition(b"\r\n\r\n")
        wire.received[:] = rest
        status = status_of(head)
        if status != "100":
            return status
    if wire.received:
        return status_of(bytes(wire.received))
    return CUT if wire.closed else NOTHING


def answered(wire: Wire) -> bool:
    """Whether an answer has begun that is not only a leave to go on."""
    return bool(wire.received.replace(CONTINUE, b""))


def status_of(head: bytes) -> str:
    """The status in the head of an answer; `h2` for HTTP/2's first frame, first bytes where it is neither."""
    if head[3:5] == b"\x04\x00":
        return HTTP2
    words = head.split(None, 2)
    return words[1].decode() if len(words) > 1 and words[0].startswith(b"HTTP/") else repr(head[:16])


async def together(*asking: Awaitable[Iterable[str]]) -> list[str]:
    """Wait for all at once; their codes in one list."""
    return list(itertools.chain.from_iterable(await asyncio.gather(*asking)))


async def ask(place: Place, *pieces: bytes, patience_seconds: float = PATIENCE_SECONDS, ends: bool = False) -> str:
    """Send pieces while listening, stop at the first answer, return its status; `ends` closes our side after them."""
    async with connected(place) as wire:
        for piece in pieces:
            if wire.received or not await wire.send(piece, patience_seconds):
                break
        if ends:
            wire.send_end()
        return await reply(wire, patience_seconds)


def head(method: str, path: str, *lines: str, host: str = "127.0.0.1") -> bytes:
    """A request's head as latin-1, with these header lines as they are."""
    return "\r\n".join((f"{method} {path} HTTP/1.1", f"Host: {host}", *lines, "", "")).encode("latin-1")


def post(path: str, body: bytes, *lines: str) -> bytes:
    """A whole POST with its Content-Length."""
    return head("POST", path, f"Content-Length: {len(body)}", *lines) + body
