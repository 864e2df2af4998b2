"""`StreamClient`: streams one generated row from a replica, or from an engine with an OpenAI API (vLLM, SGLang).

Closing the connection cancels the generation (decision 41), and so does cancelling the task that reads the stream.
"""

import asyncio
import contextlib
import io
import json
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import aiohttp

from trimtab_pipelines.engines import EngineKind
from trimtab_protocol import ProtocolError
from trimtab_protocol.chat.engine_responses import response_parser
from trimtab_protocol.chat.internal_wire import (
    IMAGES,
    MESSAGES,
    Chunk,
    Event,
    LastChunk,
    StreamFailure,
    outputs_from_responses,
    parse_event,
)
from trimtab_protocol.chat.merged_chunks import MergedChunks
from trimtab_protocol.chat.openai_backend import COMPLETIONS, ChunkParser, completion_request, parse_failure
from trimtab_protocol.chat.openai_responses import token_logprobs
from trimtab_protocol.http_client import Tls
from trimtab_protocol.rest import JSON_CONTENT_TYPE
from trimtab_protocol.sanitize import printable
from trimtab_protocol.sse import SseParser
from trimtab_protocol.tensors import Array
from trimtab_router.scheduling.replica_slots import (
    BatchFailed,
    BatchOutcome,
    Completed,
    NotReady,
    Rejected,
    ReplicaLost,
    StreamCut,
)
from trimtab_router.transport.batch_codec import BatchRequest

CLIENT_ERROR_STATUSES = frozenset({400, 413, 422})
NOT_READY_STATUSES = frozenset({404, 429, 503})
CONNECT_SECONDS = 2.0
MAX_ERROR_BYTES = 2**16
_READ_BUFFER_BYTES, _MAX_INLINE_BYTES = 2**16, 2**20
IDLE_SECONDS = 15.0
BACKEND_IDLE_SECONDS = 2.0  # until closed: engines close after five, and would lose a request sent then
_RETRY_LATER = frozenset({429, 503})  # by which an engine asks for a retry; 404: it lacks the model
LACKS_PATH_STATUSES = frozenset({404, 405, 501})
YIELDED_TURNS = 2  # before a later chunk is read: to read other streams' first chunks, and forward them


def _read_event(kind: str, data: bytes) -> Sequence[Event]:
    return (parse_event(kind, data),)


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """Request for one generated row."""

    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    read: Callable[[str, bytes], Sequence[Event]] = _read_event
    """Parses one server-sent event, given its kind and data."""
    end: Callable[[], Sequence[Event]] = tuple
    """Events at the end of the stream."""
    not_ready: frozenset[int] = NOT_READY_STATUSES
    """Statuses by which the replica reports that it cannot serve now."""
    feed: Callable[[bytes], Iterator[tuple[str, bytes]]] = field(default_factory=lambda: SseParser().feed)
    """Splits bytes into server-sent events."""
    may_lack_path: bool = False
    """Whether the replica may have no such path."""


def openai_stream_request(kind: EngineKind, model: str, tenant: str, batch: BatchRequest) -> StreamRequest:
    """Request for one row; engines take its unique name as id. Raises ProtocolError if it is not a chat."""
    row = {tensor.name: tensor.array for (tensor,) in batch.inputs}
    request_id = "-".join(filter(None, (batch.headers.get("x-request-id"), batch.id)))
    headers = {"Content-Type": JSON_CONTENT_TYPE, **batch.headers, "x-request-id": request_id}
    forwarded = batch.forwarded
    if forwarded is None:
        parser = ChunkParser(images=IMAGES in row)
        body = completion_request(model, row, cache_salt=tenant, kind=kind, processor_kwargs=batch.processor_kwargs)
        return StreamRequest(COMPLETIONS, body, headers, parser.read, parser.end, _RETRY_LATER)
    feed, read, end = response_parser(forwarded)
    body = forwarded.body(model, tenant if kind.salts_prefixes else "", bytes(row[MESSAGES][0]))
    headers["Content-Type"] = forwarded.content_type
    return StreamRequest(forwarded.route.path, body, headers, read, end, _RETRY_LATER, feed, may_lack_path=True)


class StreamClient:
    """Connections to one replica for streamed responses."""

    def __init__(
        self,
        name: str,
        address: str,
        tls: Tls,
        *,
        idle_seconds: float = IDLE_SECONDS,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`headers` are sent with every request."""
        self._headers = headers
        self._name = name
        self._address = address
        self._tls = tls
        self._idle_seconds = idle_seconds
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def generate(
        self,
        request: StreamRequest,
        *,
        point: str,
        begin_seconds: float,
        gap_seconds: float,
        max_bytes: int,
        merges: bool,
        on_chunk: Callable[[Chunk | LastChunk], None],
    ) -> BatchOutcome:
        """Generate one row, or return the failure.

        The seconds bound the first chunk, and the gap to each event; `max_bytes` bounds the stream. `merges`: the last
        chunk has all that earlier ones say beside their text.
        """
        reader = _StreamReader(on_chunk, MergedChunks() if merges else None)
        try:
            return await self._read_stream(request, reader, begin_seconds, gap_seconds, max_bytes, point)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return self._lost(_cause(error), reader, disconnected=not isinstance(error, TimeoutError))
        except ProtocolError as error:
            return self._failed(StreamFailure(str(error), 500), reader, request)

    async def _read_stream(
        self,
        request: StreamRequest,
        reader: "_StreamReader",
        begin_seconds: float,
        gap_seconds: float,
        max_bytes: int,
        point: str,
    ) -> BatchOutcome:
        async with (
            asyncio.timeout(begin_seconds) as deadline,
            self._post(request.path, request.body, request.headers, reader) as response,
        ):
            if response.status != 200:
                message = error_message(await response.content.read(MAX_ERROR_BYTES))
                return self._outcome_of_status(response.status, message or f"HTTP status {response.status}", request)
            async for event in read_events(response, deadline, gap_seconds, max_bytes, request):
                if isinstance(event, StreamFailure):
                    return self._failed(event, reader, request)
                outputs = reader.add(event)
                if outputs is not None:
                    return Completed((outputs,), point)
        return self._lost("the stream ended without a last chunk", reader, disconnected=True)

    async def delete(self, url: str, seconds: float) -> None:
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with (
                asyncio.timeout(seconds),
                self._open_session().delete(url, ssl=self._ssl(), allow_redirects=False),
            ):
                pass

    async def get(self, path: str, seconds: float, max_bytes: int) -> bytes:
        """Body of a resource; empty without one, or if it is larger."""
        url, headers = self._url(path), {"Accept-Encoding": "identity"}
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with (
                asyncio.timeout(seconds),
                self._open_session().get(url, headers=headers, ssl=self._ssl(), allow_redirects=False) as response,
            ):
                body = bytearray()
                while response.status == 200 and (part := await response.content.readany()):
                    body += part
                    if len(body) > max_bytes:
                        return b""
                return bytes(body)
        return b""

    async def post(
        self,
        path: str,
        body: bytes,
        headers: dict[str, str],
        seconds: float,
        max_bytes: int = MAX_ERROR_BYTES,
        *,
        until: bytes = b"",
    ) -> tuple[int, bytes]:
        """Return status and body, read up to `max_bytes` or the first `until`; status 0 without a response."""
        received = b""
        try:
            async with asyncio.timeout(seconds), self._post(path, body, headers) as response:
                while len(received) < max_bytes and (part := await response.content.read(max_bytes)):
                    received += part
                    if until and until in part:
                        break
                return response.status, received
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            return 0, _cause(error).encode()

    def _post(
        self, path: str, body: bytes, headers: dict[str, str], reader: "_StreamReader | None" = None
    ) -> "aiohttp.client._BaseRequestContextManager[aiohttp.ClientResponse]":
        url = self._url(path)
        # A large body is sent in parts: sent at once it would block the event loop.
        data = body if len(body) <= _MAX_INLINE_BYTES else io.BytesIO(body)
        return self._open_session().post(
            url, data=data, headers=headers, ssl=self._ssl(), allow_redirects=False, trace_request_ctx=reader
        )

    def _url(self, path: str) -> str:
        return f"{'http' if self._tls() is None else 'https'}://{self._address}{path}"

    def _ssl(self) -> "ssl.SSLContext | bool":
        return self._tls() or True

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            tracing = aiohttp.TraceConfig()
            tracing.on_request_headers_sent.append(_mark_delivered)
            self._session = aiohttp.ClientSession(
                trace_configs=[tracing],
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=self._idle_seconds),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                auto_decompress=False,
                read_bufsize=_READ_BUFFER_BYTES,
            )
        return self._session

    def _failed(self, failed: StreamFailure, reader: "_StreamReader", request: StreamRequest) -> BatchOutcome:
        if reader.begun:
            return StreamCut(f"model server {self._name}: {printable(failed.message)}", lost=False)
        return self._outcome_of_status(failed.code, failed.message, request)

    def _outcome_of_status(self, code: int, message: str, request: StreamRequest) -> NotReady | Rejected | BatchFailed:
        if code in request.not_ready:
            return NotReady()
        if code in CLIENT_ERROR_STATUSES:
            return Rejected(printable(message), code)
        if request.may_lack_path and code in LACKS_PATH_STATUSES:
            return Rejected(printable(f"its engine does not serve {request.path}: {message}"), 404)
        return BatchFailed(f"model server {self._name} answered {code}: {printable(message)}")

    def _lost(self, cause: str, reader: "_StreamReader", *, disconnected: bool) -> ReplicaLost | StreamCut:
        message = f"{self._name}: {printable(cause)}"
        if reader.begun:
            return StreamCut(message)
        return ReplicaLost(message, delivered=reader.delivered, disconnected=disconnected)


class _StreamReader:
    """Chunks of one response so far. `delivered`: the replica may have received the request."""

    def __init__(self, on_chunk: Callable[[Chunk | LastChunk], None], merged: MergedChunks | None) -> None:
        self.delivered = False
        self._on_chunk = on_chunk
        self._merged = merged
        self._texts: list[str] = []

    @property
    def begun(self) -> bool:
        return bool(self._texts)

    def add(self, event: Chunk | LastChunk) -> dict[str, Array] | None:
        """Forward a chunk. Returns the outputs of the whole response if it is the last."""
        self._texts.append(event.text)
        if self._merged is not None and (written := _written(event)) is not None:
            self._merged.add(written)
        if not isinstance(event, LastChunk):
            self._on_chunk(event)
            return None
        text = "".join(self._texts)
        if self._merged is not None:
            event = replace(event, text=text, whole=self._merged.result() or None)
        self._on_chunk(event)
        return outputs_from_responses([(text, event)])


def _written(event: Chunk | LastChunk) -> Mapping[str, Any] | None:
    """What a chunk says beside its text, in the form of OpenAI's chunks."""
    if isinstance(event, Chunk) and event.logprob is not None:
        return {"choices": [{"index": 0, "logprobs": token_logprobs([event])}]}
    return event.written


async def _mark_delivered(
    _: aiohttp.ClientSession, context: SimpleNamespace, __: aiohttp.TraceRequestHeadersSentParams
) -> None:
    """Note, before the first byte of a request is sent, that the replica may receive it."""
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.delivered = True


def _cause(error: Exception) -> str:
    return "timed out" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


async def read_events(
    response: aiohttp.ClientResponse,
    deadline: asyncio.Timeout,
    gap_seconds: float,
    max_bytes: int,
    request: StreamRequest,
) -> AsyncIterator[Event]:
    """Events of a stream. Each event extends the deadline by `gap_seconds`.

    One step of a model yields events on many streams at once. First chunks are read before later ones.
    """
    loop = asyncio.get_running_loop()
    begun, received = False, 0
    async for data_part in response.content.iter_any():
        received += len(data_part)
        if received > max_bytes:
            raise ProtocolError(f"the response has more than {max_bytes} bytes")
        if begun:
            for _ in range(YIELDED_TURNS):
                await asyncio.sleep(0)
        for kind, data in request.feed(data_part):
            for event in request.read(kind, data):
                begun = True  # an engine may send a role long before a token
                yield event
        if begun:
            deadline.reschedule(loop.time() + gap_seconds)
    for event in request.end():
        yield event


def error_message(body: bytes) -> str:
    try:
        return parse_failure(json.loads(body))[0]
    except (ValueError, AttributeError, RecursionError):
        return ""
