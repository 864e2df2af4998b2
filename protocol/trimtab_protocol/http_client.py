"""HTTP/1.1 keep-alive connections to a model server without copies of bodies.

A general HTTP client takes more time per batch than the rest of the router. This one supports only what the data port
uses: responses with a Content-Length, received into the buffer that the tensors share.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from math import inf
from typing import NamedTuple, cast

import numpy as np

from trimtab_protocol import Buffer
from trimtab_protocol.mutual_tls import explain_ssl_error
from trimtab_protocol.sanitize import fits_header

MAX_HEAD_BYTES = 64 * 1024
MAX_CACHED_HEADS = 64
MAX_BODY_BYTES = 2**31
"""Default maximum of a response body."""
_TIMER_SECONDS = 0.002
"""Timers of an event loop may be this early."""
_END_OF_HEAD = b"\r\n\r\n"
Tls = Callable[[], ssl.SSLContext | None]
"""Returns the TLS context of a new connection, if any."""


class ConnectionLost(Exception):
    """The peer closed the connection, was too slow, or sent invalid HTTP."""


class PeerIdentityError(ConnectionLost):
    """The peer's certificate was not accepted, or it did not accept ours."""


class Reply(NamedTuple):
    """A response; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: memoryview


OnEnd = Callable[[Reply | Exception], None]


class HttpConnection(asyncio.BufferedProtocol):
    """A connection with one exchange at a time; closed after any error."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.tls = tls
        self._transport: asyncio.Transport | None = None
        self._on_end: OnEnd | None = None
        self._deadline = inf
        self._timer: asyncio.TimerHandle | None = None
        self._head = bytearray(MAX_HEAD_BYTES)
        self._whole_head = memoryview(self._head)
        self._head_filled = 0
        self._status = 0
        self._headers: Mapping[str, str] = {}
        self._body: memoryview | None = None
        self._body_filled = 0
        self._max_body_bytes = 0
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(cls, host: str, port: int, tls: ssl.SSLContext | None = None) -> "HttpConnection":
        """Connect.

        Raises PeerIdentityError if the peer's certificate is not trusted. Raises ConnectionLost if the connection
        failed.
        """
        connection = cls(tls)
        try:
            await asyncio.get_running_loop().create_connection(lambda: connection, host, port, ssl=tls)
        except ssl.SSLError as error:
            raise PeerIdentityError(explain_ssl_error(error)) from error
        except OSError as error:
            raise ConnectionLost(f"{host}:{port}: {error.strerror or error}") from error
        return connection

    @property
    def usable(self) -> bool:
        return self._on_end is None and self._transport is not None and not self._transport.is_closing()

    async def exchange(
        self,
        head: bytes,
        body: Sequence[Buffer] = (),
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        deadline: float | None = None,
    ) -> Reply:
        """Send a request and wait for its response; a cancelled wait closes the connection.

        Raises ConnectionLost if the connection was lost, or the response is invalid or too large, and TimeoutError at
        the deadline, a time of the event loop.
        """
        waiter: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.start(head, body, partial(_resolve, waiter), max_body_bytes=max_body_bytes, deadline=deadline)
        try:
            return await waiter
        except asyncio.CancelledError:
            self.close()
            raise

    def start(
        self,
        head: bytes,
        body: Sequence[Buffer],
        on_end: OnEnd,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        deadline: float | None = None,
    ) -> None:
        """`exchange` that calls `on_end` once, later, with the response or the error. It must not raise."""
        transport = self._transport
        if transport is None or self._on_end is not None or transport.is_closing():
            raise self._lost("the connection is closed")
        self._on_end = on_end
        self._max_body_bytes = max_body_bytes
        self._deadline = inf if deadline is None else deadline
        if deadline is not None and (self._timer is None or deadline < self._timer.when()):
            self._set_timer(deadline)
        transport.writelines([head, *body])

    def _set_timer(self, time: float) -> None:
        """Set the timer. It stays set between exchanges, because most end long before their deadlines."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(time, self._expire)

    def close(self) -> None:
        """Close at once; an exchange in flight fails with ConnectionLost."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        lost = f"the connection was lost: {exc}" if exc else "the connection was closed by the other side"
        self._end(self._lost(lost))
        if not self.closed.done():
            self.closed.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - the size is known better here
        if self._body is None:
            return self._whole_head[self._head_filled :] if self._head_filled else self._whole_head
        return self._body[self._body_filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Process received bytes; unexpected bytes close the connection, since they could answer the next request."""
        if self._on_end is None:
            self._give_up("it sent unexpected data")
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
            self._status, self._headers, length = _parse_head(bytes(self._whole_head[:end]))
        except (ValueError, KeyError, IndexError):
            self._give_up("its response is not HTTP/1.1 with a Content-Length")
            return
        begun = self._head_filled - end - len(_END_OF_HEAD)
        if not begun <= length <= self._max_body_bytes:
            self._give_up(f"it sent {max(begun, length)} bytes, of at most {min(length, self._max_body_bytes)} wanted")
            return
        self._body = np.empty(length, np.uint8).data  # pages are committed as bytes arrive
        self._body[:begun] = self._whole_head[self._head_filled - begun : self._head_filled]
        self._body_filled = begun

    def _finish(self, body: memoryview) -> None:
        reply = Reply(self._status, self._headers, body)
        self._body = None
        self._head_filled = self._body_filled = 0
        if self._headers.get("connection", "").lower() == "close":
            self.close()
        self._end(reply)

    def _give_up(self, why: str) -> None:
        self.close()
        self._end(ConnectionLost(why))

    def _expire(self) -> None:
        self._timer = None
        if self._on_end is None or self._deadline == inf:
            return
        if asyncio.get_running_loop().time() < self._deadline - _TIMER_SECONDS:  # of a later exchange
            self._set_timer(self._deadline)
            return
        self.close()
        self._end(TimeoutError())

    def _end(self, result: Reply | Exception) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(result)

    def _lost(self, why: str) -> ConnectionLost:
        """Error of a lost connection. In TLS 1.3 a rejected client learns it only after its handshake."""
        if self.tls is None or self._status:
            return ConnectionLost(why)
        return PeerIdentityError(
            "it closed the connection before any answer; its log says if it refuses our certificate"
        )


def _resolve(waiter: asyncio.Future[Reply], result: Reply | Exception) -> None:
    if waiter.done():
        return
    if isinstance(result, Exception):
        waiter.set_exception(result)
    else:
        waiter.set_result(result)


class ConnectionPool:
    """Connections to one address; idle ones are reused."""

    def __init__(self, host: str, port: int, tls: Tls = lambda: None) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._idle: list[HttpConnection] = []

    async def take(self) -> HttpConnection:
        """An idle connection, or a new one; raises as `HttpConnection.open`."""
        return self.idle() or await self.open()

    def idle(self) -> HttpConnection | None:
        """An idle connection, if there is one."""
        tls = self._tls()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.tls is tls:
                return connection
            connection.close()
        return None

    async def open(self) -> HttpConnection:
        """A new connection; raises as `HttpConnection.open`."""
        return await HttpConnection.open(self._host, self._port, self._tls())

    def give_back(self, connection: HttpConnection) -> None:
        """Return a connection after its exchange, unless it was closed."""
        if connection.usable:
            self._idle.append(connection)

    def close(self) -> list[asyncio.Future[None]]:
        """Close idle connections; returns once each is closed."""
        closing, self._idle = self._idle, []
        for connection in closing:
            connection.close()
        return [connection.closed for connection in closing]


def request_head(method: str, path: str, host: str, headers: dict[str, str], content_length: int) -> bytes:
    """The head of a request.

    Raises ValueError if a line of it is not printable ASCII; it could become another header, or another request.
    """
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {content_length}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if not fits_header("".join(lines)):
        wrong = next(line for line in lines if not fits_header(line))
        raise ValueError(f"{ascii(wrong)[:200]} cannot stand in the head of a request; send printable ASCII only")
    return "\r\n".join([*lines, "", ""]).encode("ascii")


def _content_length(headers: Mapping[str, str]) -> int:
    written = headers["content-length"]
    if "transfer-encoding" in headers or not (written.isascii() and written.isdigit() and len(written) <= 15):
        raise ValueError(written)
    return int(written)


@lru_cache(MAX_CACHED_HEADS)  # a replica repeats the heads of its responses
def _parse_head(head: bytes) -> tuple[int, Mapping[str, str], int]:
    """Status, headers and length of the body."""
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        key, value = name.strip().lower(), value.strip()
        if key == "content-length" and headers.get(key, value) != value:
            raise ValueError(line)
        headers[key] = value
    return int(status_line.split(" ", 2)[1]), headers, _content_length(headers)
