"""`SseWriter`: streams a response as server-sent events. A slow reader, or one that leaves, ends the generation."""

import asyncio
from collections.abc import Iterator

from aiohttp import web

from trimtab_protocol import InferResponse
from trimtab_protocol.chat import openai_responses
from trimtab_protocol.chat.engine_responses import ForwardedChunkWriter
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk
from trimtab_protocol.chat.openai_responses import KEEP_ALIVE, STREAM_HEADERS, ChunkWriter
from trimtab_protocol.errors import InvalidChat
from trimtab_protocol.sse import sse_event
from trimtab_router.ingress.base import require_timely_read
from trimtab_router.refusal import Refusal
from trimtab_router.request import Call
from trimtab_router.router import Router

ALIVE_SECONDS = 15.0  # interval of keep-alive comments

_INLINE_BYTES = 2**14  # writes below this size do not fill an empty connection buffer

Event = tuple[int, Chunk | LastChunk]
StreamEncoder = ChunkWriter | ForwardedChunkWriter


class SseWriter:
    """Writer of one streamed response."""

    def __init__(self, router: Router, request: web.BaseRequest, headers: dict[str, str]) -> None:
        self._router = router
        self._request = request
        self._headers = STREAM_HEADERS | headers
        self._events: asyncio.Queue[Event | bytes | None] = asyncio.Queue()
        """Chunks, bytes to be written as they are, and None at the end."""
        self._keep_alive_timer: asyncio.TimerHandle | None = None
        self._last_chunks: dict[int, LastChunk] = {}
        self._response: web.StreamResponse | None = None

    async def write_stream(self, call: Call, chunks: StreamEncoder, choices: int) -> web.StreamResponse:
        """Write the stream to its end. Raises Refusal if it fails before the first chunk."""
        call.listener = lambda row, chunk: self._events.put_nowait((row, chunk))
        generation = asyncio.get_running_loop().create_task(self._router.infer(call))
        generation.add_done_callback(lambda _: self._events.put_nowait(None))
        try:
            async with asyncio.timeout(self._router.max_request_seconds):
                await self._forward_events(chunks, choices, call)
            await self._end(generation, chunks)
        except TimeoutError:
            refusal = Refusal("DeadlineExpired", "the response took too long")
            if self._response is None:
                raise refusal from None
            await self._write(sse_event(sse_error(refusal)))
        finally:
            if self._keep_alive_timer is not None:
                self._keep_alive_timer.cancel()
            generation.cancel()
            await asyncio.gather(generation, return_exceptions=True)
        assert self._response is not None  # noqa: S101 - without a chunk there was a refusal
        await self._response.write_eof()
        return self._response

    async def _forward_events(self, chunks: StreamEncoder, choices: int, call: Call) -> None:
        """Write events as they arrive. Events that arrive during a write are written together."""
        self._keep_alive()
        while (event := await self._events.get()) is not None:
            if self._response is None:
                chunks.variant(call.variant)
            data = b"".join(self._encode(chunks, queued) for queued in (event, *self._queued_events()))
            if self._response is None:
                await self._open()
                data = b"".join(map(chunks.first, range(choices))) + data
            if data:
                await self._write(data)

    def _keep_alive(self) -> None:
        """Queue a keep-alive comment. One timer per response costs less than one per chunk."""
        self._keep_alive_timer = asyncio.get_running_loop().call_later(ALIVE_SECONDS, self._keep_alive)
        if self._response is not None:
            self._events.put_nowait(KEEP_ALIVE)

    def _queued_events(self) -> Iterator[Event | bytes]:
        while not self._events.empty():
            event = self._events.get_nowait()
            if event is None:  # read again after these events
                self._events.put_nowait(None)
                return
            yield event

    def _encode(self, chunks: StreamEncoder, event: Event | bytes) -> bytes:
        if isinstance(event, bytes):
            return event
        row, chunk = event
        if isinstance(chunk, Chunk):
            return chunks.chunk(row, chunk)
        self._last_chunks[row] = chunk
        return chunks.last(row, chunk)

    async def _end(self, generation: "asyncio.Task[InferResponse]", chunks: StreamEncoder) -> None:
        try:
            await generation
        except Refusal as refusal:
            if self._response is None:
                raise
            await self._write(sse_event(sse_error(refusal)))
        else:
            await self._write(chunks.end([last for _, last in sorted(self._last_chunks.items())]))

    async def _open(self) -> None:
        self._response = web.StreamResponse(headers=self._headers)
        await self._response.prepare(self._request)

    async def _write(self, data: bytes) -> None:
        assert self._response is not None  # noqa: S101 - nothing is written before it is open
        if len(data) < _INLINE_BYTES and _is_drained(self._request):
            await self._response.write(data)
        else:
            await require_timely_read(self._request, self._response.write(data))


def _is_drained(request: web.BaseRequest) -> bool:
    """Whether the client has read everything sent, so that a small write does not block."""
    return request.transport is not None and request.transport.get_write_buffer_size() == 0


def sse_error(refusal: Refusal) -> openai_responses.Json:
    cause = refusal.__cause__
    param, code = (cause.param, cause.code) if isinstance(cause, InvalidChat) else (None, None)
    return openai_responses.error_body(
        refusal.code.value, refusal.message, reason=refusal.reason, param=param, code=code
    )
