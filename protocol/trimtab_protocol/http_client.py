"""HTTP/1.1 keep-alive connections to a model server, one exchange at a time, with no copy of a body on either way.

A general HTTP client spends more on a batch than everything else in the router together; this one knows only what the
data port speaks: answers with a Content-Length, received straight into the buffer that the tensors will share.
"""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from trimtab_protocol import Buffer
from trimtab_protocol.mutual_tls import explain_ssl_error as why_refused
from trimtab_protocol.sanitize import fits_header

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 2**31
"""Where whoever asks knows no better."""
_END_OF_HEAD = b"\r\n\r\n"
Tls = Callable[[], ssl.SSLContext | None]
"""What a connection made now is to be secured with, if anything."""


class ConnectionLost(Exception):
    """The other side went away, was too slow, or does not speak HTTP as we need it."""


class PeerIdentityError(ConnectionLost):
    """The other side is there, and is not who it must be; the message says why."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: memoryview


class HttpConnection(asyncio.BufferedProtocol):
    """A connection; after any error it is closed and of no further use."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.tls = tls
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Reply] | None = None
        self._head = bytearray(MAX_HEAD_BYTES)
        self._head_filled = 0
        self._status = 0
        self._headers: dict[str, str] = {}
        self._body: memoryview | None = None
        self._body_filled = 0
        self._most_body_bytes = 0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, host: str, port: int, tls: ssl.SSLContext | None = None) -> "HttpConnection":
        """Connect.

        Raises:
            PeerRefused: who listens is not who `tls` trusts.
            ConnectionBroken: nobody listens.
        """
        connection = cls(tls)
        try:
            await asyncio.get_running_loop().create_connection(lambda: connection, host, port, ssl=tls)
        except ssl.SSLError as error:
            raise PeerIdentityError(why_refused(error)) from error
        except OSError as error:
            raise ConnectionLost(f"{host}:{port}: {error.strerror or error}") from error
        return connection

    @property
    def usable(self) -> bool:
        """Whether another exchange may begin."""
        return self._transport is not None and self._waiter is None and not self._transport.is_closing()

    async def exchange(
        self, head: bytes, body: Sequence[Buffer] = (), *, max_body_bytes: int = MAX_BODY_BYTES
    ) -> Reply:
        """Send a request and wait for its answer, of so many bytes at most; a cancelled wait closes the connection.

        Raises:
            ConnectionBroken: it was lost, or what came is no such answer.
        """
        transport = self._transport
        if transport is None or not self.usable:
            raise self._lost("the connection is closed")
        self._waiter = asyncio.get_running_loop().create_future()
        self._most_body_bytes = max_body_bytes
        try:
            transport.writelines([head, *body])
            return await self._waiter
        except asyncio.CancelledError:
            transport.abort()
            raise
        finally:
            self._waiter = None

    def close(self) -> None:
        """Close at once; an exchange under way ends with ConnectionBroken."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever waits."""
        lost = f"the connection was lost: {exc}" if exc else "the connection was closed by the other side"
        self._fail(self._lost(lost))
        if not self.closed.done():
            self.closed.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the size is known better here
        """Where the next bytes go: the rest of the head's room, or of the body."""
        if self._body is None:
            return memoryview(self._head)[self._head_filled :]
        return self._body[self._body_filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Take note of received bytes; who sends what nobody asked for could answer the next request with it."""
        if self._waiter is None or self._waiter.done():  # the loop may read on before who waited goes on
            self._give_up("it sent what was not asked for")
            return
        if self._body is None:
            self._head_filled += nbytes
            self._try_head()
        else:
            self._body_filled += nbytes
        if self._body is not None and self._body_filled == len(self._body):
            self._finish(self._body)

    def _try_head(self) -> None:
        end = self._head.find(_END_OF_HEAD, 0, self._head_filled)
        if end < 0:
            if self._head_filled == MAX_HEAD_BYTES:
                self._give_up(f"its headers are longer than {MAX_HEAD_BYTES} bytes")
            return
        try:
            self._status, self._headers = _parse_head(bytes(self._head[:end]))
            length = _content_length(self._headers)
        except (ValueError, KeyError, IndexError):
            self._give_up("its answer is not HTTP/1.1 with a Content-Length")
            return
        begun = self._head_filled - end - len(_END_OF_HEAD)
        if not begun <= length <= self._most_body_bytes:
            self._give_up(f"it sent {max(begun, length)} bytes, of at most {min(length, self._most_body_bytes)} wanted")
            return
        self._body = np.empty(length, np.uint8).data  # memory is spent as bytes arrive, whatever was announced
        self._body[:begun] = self._head[self._head_filled - begun : self._head_filled]
        self._body_filled = begun

    def _finish(self, body: memoryview) -> None:
        reply = Reply(self._status, self._headers, body)
        self._body = None
        self._head_filled = self._body_filled = 0
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(reply)
        if self._headers.get("connection", "").lower() == "close":
            self.close()

    def _give_up(self, why: str) -> None:
        self._fail(ConnectionLost(why))
        self.close()

    def _fail(self, broken: ConnectionLost) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(broken)

    def _lost(self, why: str) -> ConnectionLost:
        """In TLS 1.3 who connects is let in, or not, only after it has come about on his own side."""
        if self.tls is None or self._status:
            return ConnectionLost(why)
        return PeerIdentityError(
            "it closed the connection before any answer; its log says if it refuses our certificate"
        )


class ConnectionPool:
    """Connections to one address: as many as there are exchanges under way, kept for the next ones."""

    def __init__(self, host: str, port: int, tls: Tls = lambda: None) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._idle: list[HttpConnection] = []

    async def take(self) -> HttpConnection:
        """An idle connection, else a new one; raises as `HttpConnection.open` does."""
        tls = self._tls()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.tls is tls:
                return connection
            connection.close()
        return await HttpConnection.open(self._host, self._port, tls)

    def give_back(self, connection: HttpConnection) -> None:
        """Keep a connection whose exchange is over, unless it was closed."""
        if connection.usable:
            self._idle.append(connection)

    def close(self) -> list[asyncio.Future[None]]:
        """Close the idle ones; returns what is done once each is."""
        closing, self._idle = self._idle, []
        for connection in closing:
            connection.close()
        return [connection.closed for connection in closing]


def request_head(method: str, path: str, host: str, headers: dict[str, str], content_length: int) -> bytes:
    """The head of a request.

    Raises:
        ValueError: a line of it is not printable ASCII; it could become another header, or another request.
    """
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {content_length}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    for line in lines:
        if not fits_header(line):
            raise ValueError(f"{ascii(line)[:200]} cannot stand in the head of a request; send printable ASCII only")
    return "\r\n".join([*lines, "", ""]).encode("ascii")


def _content_length(headers: dict[str, str]) -> int:
    written = headers["content-length"]
    if "transfer-encoding" in headers or not (written.isascii() and written.isdigit() and len(written) <= 15):
        raise ValueError(written)
    return int(written)


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        key, value = name.strip().lower(), value.strip()
        if key == "content-length" and headers.get(key, value) != value:
            raise ValueError(line)
        headers[key] = value
    return int(status_line.split(" ", 2)[1]), headers
