"""Shell: one row to a replica that writes, and its answer back, piece by piece as it comes.

Closing the connection is how a replica is told that nobody waits any more (decision 41), so a stream is read by a task
of its own, and cancelling that task is all it takes.
"""

import asyncio
import contextlib
import io
import json
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import aiohttp

from trimtab_protocol import ProtocolError
from trimtab_protocol.chat.internal_wire import Chunk, Event, Failed, LastChunk, event_of, outputs_of
from trimtab_protocol.chat.openai_backend import failure_in
from trimtab_protocol.http_client import Tls
from trimtab_protocol.sanitize import printable
from trimtab_protocol.sse import SseParser
from trimtab_protocol.tensors import Array
from trimtab_router.scheduling.batch_outcomes import (
    BatchFailed,
    Completed,
    Ending,
    NotReady,
    Rejected,
    ReplicaLost,
    StreamCut,
)

CALLERS_FAULT = frozenset({400, 413, 422})
NOT_READY = frozenset({404, 429, 503})
CONNECT_SECONDS = 2.0
MOST_ERROR_BYTES = 2**16
_LONGEST_READ_BYTES, _LONGEST_WHOLE_BYTES = 2**16, 2**20
IDLE_SECONDS = 15.0
TURNS_OF_OTHERS = 2
"""Of the event loop: in the first a first piece is read, in the second its caller is told."""


def _read_inner(kind: str, data: bytes) -> Sequence[Event]:
    return (event_of(kind, data),)


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """One row to be written, as its replica reads it, and how what comes back is read.

    Attributes:
        path: of the request.
        body: the same.
        headers: the same.
        read: what one event of the answer says, by its kind and its data.
        not_ready: statuses by which the replica says that it cannot serve now.
    """

    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    read: Callable[[str, bytes], Sequence[Event]] = _read_inner
    not_ready: frozenset[int] = NOT_READY


class StreamClient:
    """Connections to one replica for answers that come in pieces.

    Args:
        name: of the replica.
        address: HOST:PORT.
        tls: what connections are secured with.
        idle_seconds: after which a connection that nobody uses is closed.
    """

    def __init__(self, name: str, address: str, tls: Tls, *, idle_seconds: float = IDLE_SECONDS) -> None:
        self._name = name
        self._address = address
        self._tls = tls
        self._idle_seconds = idle_seconds
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    async def write(
        self,
        order: StreamRequest,
        *,
        point: str,
        begin_seconds: float,
        gap_seconds: float,
        wrote: Callable[[Chunk | LastChunk], None],
    ) -> Ending:
        """Have one row written; what goes wrong on the way is told, not raised.

        Args:
            order: the row.
            point: the operating point asked for.
            begin_seconds: within which the first piece must come.
            gap_seconds: within which something must come after it.
            wrote: is told of each piece, the last one too.
        """
        heard = _Heard(wrote)
        try:
            return await self._written(order, heard, begin_seconds, gap_seconds, point)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return self._gone(_why(error), heard)
        except ProtocolError as error:
            return self._failed(Failed(str(error), 500), heard, order)

    async def _written(
        self, order: StreamRequest, heard: "_Heard", begin_seconds: float, gap_seconds: float, point: str
    ) -> Ending:
        async with (
            asyncio.timeout(begin_seconds) as patience,
            self._post(order.path, order.body, order.headers, heard) as response,
        ):
            if response.status != 200:
                message = message_in(await response.content.read(MOST_ERROR_BYTES))
                return self._by_code(response.status, message or f"HTTP status {response.status}", order)
            async for said in _events(response, patience, gap_seconds, order.read):
                if isinstance(said, Failed):
                    return self._failed(said, heard, order)
                outputs = heard.hear(said)
                if outputs is not None:
                    return Completed((outputs,), point)
        return self._gone("it ended its answer without a last word", heard)

    async def delete(self, url: str, seconds: float) -> None:
        """Ask for something to be deleted; whether it was is not told."""
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(seconds), self._opened().delete(url, ssl=self._ssl(), allow_redirects=False):
                pass

    async def ask(self, path: str, body: bytes, headers: dict[str, str], seconds: float) -> tuple[int, bytes]:
        """A short answer, with its status; 0 where there is none."""
        try:
            async with asyncio.timeout(seconds), self._post(path, body, headers) as response:
                return response.status, await response.content.read(MOST_ERROR_BYTES)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return 0, _why(error).encode()

    def _post(
        self, path: str, body: bytes, headers: dict[str, str], heard: "_Heard | None" = None
    ) -> "aiohttp.client._BaseRequestContextManager[aiohttp.ClientResponse]":
        scheme = "http" if self._tls() is None else "https"
        url = f"{scheme}://{self._address}{path}"
        # A large one goes out in pieces: handed over whole it holds up everybody else.
        data = body if len(body) <= _LONGEST_WHOLE_BYTES else io.BytesIO(body)
        return self._opened().post(
            url, data=data, headers=headers, ssl=self._ssl(), allow_redirects=False, trace_request_ctx=heard
        )

    def _ssl(self) -> "ssl.SSLContext | bool":
        return self._tls() or True

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            leaving = aiohttp.TraceConfig()
            leaving.on_request_headers_sent.append(_leaves)
            self._session = aiohttp.ClientSession(
                trace_configs=[leaving],
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._idle_seconds),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                read_bufsize=_LONGEST_READ_BYTES,
            )
        return self._session

    def _failed(self, failed: Failed, heard: "_Heard", order: StreamRequest) -> Ending:
        if heard.begun:
            return StreamCut(f"model server {self._name}: {printable(failed.message)}", lost=False)
        return self._by_code(failed.code, failed.message, order)

    def _by_code(self, code: int, message: str, order: StreamRequest) -> NotReady | Rejected | BatchFailed:
        if code in order.not_ready:
            return NotReady()
        if code in CALLERS_FAULT:
            return Rejected(printable(message), code)
        return BatchFailed(f"model server {self._name} answered {code}: {printable(message)}")

    def _gone(self, why: str, heard: "_Heard") -> ReplicaLost | StreamCut:
        message = f"{self._name}: {printable(why)}"
        return StreamCut(message) if heard.begun else ReplicaLost(message, delivered=heard.delivered)


class _Heard:
    """What was heard of one answer so far; ``delivered``: the replica may have what was asked."""

    def __init__(self, wrote: Callable[[Chunk | LastChunk], None]) -> None:
        self.delivered = False
        self._wrote = wrote
        self._texts: list[str] = []

    @property
    def begun(self) -> bool:
        """Whether there was a piece."""
        return bool(self._texts)

    def hear(self, said: Chunk | LastChunk) -> dict[str, Array] | None:
        """Pass a piece on; the outputs of the whole answer once it is the last."""
        self._texts.append(said.text)
        self._wrote(said)
        return outputs_of("".join(self._texts), said) if isinstance(said, LastChunk) else None


async def _leaves(
    _: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceRequestHeadersSentParams
) -> None:
    """Note, just before the first byte of a request leaves on its connection, that its replica may have it."""
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.delivered = True


def _why(error: Exception) -> str:
    return "it wrote nothing for too long" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


async def _events(
    response: aiohttp.ClientResponse,
    patience: asyncio.Timeout,
    gap_seconds: float,
    read: Callable[[str, bytes], Sequence[Event]] = _read_inner,
) -> AsyncIterator[Chunk | LastChunk | Failed]:
    """What a stream says; each time something came there is time again for more.

    A step of a model says something on many streams in one moment, which all wait for each other. Answers that begin go
    ahead of those that go on.
    """
    reader, loop = SseParser(), asyncio.get_running_loop()
    begun = False
    async for piece in response.content.iter_any():
        if begun:
            for _ in range(TURNS_OF_OTHERS):
                await asyncio.sleep(0)
        for kind, data in reader.feed(piece):
            begun = True
            for said in read(kind, data):
                yield said
        if begun:
            patience.reschedule(loop.time() + gap_seconds)


def message_in(body: bytes) -> str:
    """What an answer that is none says; empty where it says nothing."""
    try:
        return failure_in(json.loads(body))[0]
    except (ValueError, AttributeError, RecursionError):
        return ""
