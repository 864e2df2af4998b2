"""HTTP/1.1 requests as bytes, valid or not, and gRPC calls as Envoy passes them to the router's socket."""

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import grpc

CUT, NOTHING = "cut", "nothing"
"""The connection was ended; no response within the patience."""
BAD_REQUEST = frozenset({CUT, "400"})
TOO_LARGE = BAD_REQUEST | {"413", "414", "431", "429"}
PATIENCE_SECONDS = 15.0
LARGE_SECONDS = 30.0
"""A large valid body takes a while on a slow machine."""
STATUS_NAMES = {str(status.value[0]): status.name for status in grpc.StatusCode}
INFER_CALL = "/inference.GRPCInferenceService/ModelInfer"
_GRPC_STATUS = re.compile(rb"\r\ngrpc-status: (\d+)\r\n")

Place = int | Path
"""A port of this machine, or a Unix socket."""
Codes = frozenset[str]


class Reader(asyncio.StreamReader):
    """A reader that returns what came before the connection was reset."""

    def set_exception(self, exc: Exception) -> None:
        del exc
        self.feed_eof()


@asynccontextmanager
async def connection(place: Place) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that is cut at the end."""
    loop, reader = asyncio.get_running_loop(), Reader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport: asyncio.BaseTransport
    if isinstance(place, Path):
        transport, _ = await loop.create_unix_connection(lambda: protocol, str(place))
    else:
        transport, _ = await loop.create_connection(lambda: protocol, "127.0.0.1", place)
    writer = asyncio.StreamWriter(cast("asyncio.WriteTransport", transport), protocol, reader, loop)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def reset(writer: asyncio.StreamWriter) -> None:
    peer: socket.socket = writer.get_extra_info("socket")
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def ask(place: Place, *pieces: bytes, patience_seconds: float = PATIENCE_SECONDS) -> str:
    """Send pieces until a response begins; return its HTTP status, `cut` or `nothing`."""
    head = await exchange(place, pieces, lambda reader: reader.readuntil(b"\r\n\r\n"), patience_seconds)
    return NOTHING if head is None else status_of(head)


async def ask_all(place: Place, requests: Iterable[bytes], *, large: bool = False) -> list[str]:
    """Send each request on a connection of its own."""
    patience_seconds = LARGE_SECONDS if large else PATIENCE_SECONDS
    return [await ask(place, request, patience_seconds=patience_seconds) for request in requests]


async def call(place: Place, *pieces: bytes, patience_seconds: float = LARGE_SECONDS) -> str:
    """Send a gRPC call to the router's socket; return the name of its status, or the status of an HTTP response."""
    response = await exchange(place, pieces, _read_grpc_status, patience_seconds)
    if response is None:
        return NOTHING
    status = _GRPC_STATUS.search(response)
    return STATUS_NAMES[status[1].decode()] if status else status_of(response)


async def exchange(
    place: Place,
    pieces: Iterable[bytes],
    read: Callable[[asyncio.StreamReader], Awaitable[bytes]],
    patience_seconds: float,
) -> bytes | None:
    """Send pieces until a response begins, and read it until the connection ends; None after the patience."""
    async with connection(place) as (reader, writer):
        first, sending = b"", asyncio.create_task(_send(writer, pieces))
        try:
            async with asyncio.timeout(patience_seconds):
                first = await reader.read(1)
                sending.cancel()
                return first + await read(reader) if first else b""
        except TimeoutError:
            return None
        except asyncio.IncompleteReadError as error:
            return first + error.partial
        except (OSError, asyncio.LimitOverrunError):
            return b""
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await sending


async def _send(writer: asyncio.StreamWriter, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        writer.write(piece)
        await writer.drain()


async def _read_grpc_status(reader: asyncio.StreamReader) -> bytes:
    """Read until a status, which stands in the head or behind the body."""
    response = b""
    while not _GRPC_STATUS.search(response):
        piece = await reader.read(2**16)
        if not piece:
            raise asyncio.IncompleteReadError(response, None)
        response += piece
    return response


def status_of(head: bytes) -> str:
    """The status of a response's head; `cut` if there is none."""
    words = head.split(None, 2)
    if not words:
        return CUT
    return words[1].decode() if len(words) > 1 and words[0].startswith(b"HTTP/") else repr(head[:16])


def head(method: str, path: str, *lines: str) -> bytes:
    """The head of a request in latin-1, with these header lines as they are."""
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *lines, "", "")).encode("latin-1")


def post(path: str, body: bytes, *lines: str) -> bytes:
    return head("POST", path, f"Content-Length: {len(body)}", *lines) + body


def grpc_frame(message: bytes, *, flag: int = 0, length: int | None = None) -> bytes:
    """A message with its prefix, which may be wrong."""
    return bytes((flag,)) + (len(message) if length is None else length).to_bytes(4, "big") + message


def grpc_post(framed: bytes, *lines: str, path: str = INFER_CALL) -> bytes:
    """A call as Envoy passes it to the router."""
    return post(path, framed, "te: trailers", "content-type: application/grpc", *lines)
