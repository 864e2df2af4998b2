"""Shell: an answer told in parts, as server-sent events, while it is being written.

Who reads slowly is cut, who leaves cancels what is written for him, and a stream never ends without saying why.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

from aiohttp import web

from trimtab_pipelines.error_codes import ErrorCode
from trimtab_protocol import InferResponse
from trimtab_protocol.chat import openai_responses
from trimtab_protocol.chat.errors import InvalidChat
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk, Usage
from trimtab_protocol.chat.openai_requests import ChatRequest
from trimtab_protocol.chat.openai_responses import ALIVE, STREAM_HEADERS, Chunks, ResponseHeader
from trimtab_router.admission.call import Call
from trimtab_router.ingress.slow_reader import require_timely_read
from trimtab_router.refusal import Refusal
from trimtab_router.router import Router

ALIVE_SECONDS = 15.0
"""How often a stream says that it lives, whether or not anything is written meanwhile."""

_AT_ONCE_BYTES = 2**14
"""Less than a connection takes before its writer has to wait."""

Said = tuple[int, Chunk | LastChunk]


class SseWriter:
    """Tells one answer in parts.

    Args:
        router: has it written.
        request: of whoever listens.
        headers: of the answer.
    """

    def __init__(self, router: Router, request: web.BaseRequest, headers: dict[str, str]) -> None:
        self._router = router
        self._request = request
        self._headers = STREAM_HEADERS | headers
        self._said: asyncio.Queue[Said | bytes | None] = asyncio.Queue()
        """Pieces, bytes that are to be told as they are, and at the end None."""
        self._alive: asyncio.TimerHandle | None = None
        self._usage: dict[int, Usage] = {}
        self._response: web.StreamResponse | None = None

    async def tell(self, asked: ChatRequest, call: Call, heading: ResponseHeader) -> web.StreamResponse:
        """Tell it to its end; raises Refusal for what has no first piece."""
        chunks = Chunks(heading, tells_usage=asked.tells_usage, logprobs=bool(asked.logprobs))
        call = replace(call, listener=self._hear)
        answering_it = asyncio.get_running_loop().create_task(self._router.infer(call))
        answering_it.add_done_callback(lambda _: self._said.put_nowait(None))
        try:
            async with asyncio.timeout(self._router.longest_seconds):
                await self._pass_on(chunks, asked.choices)
            await self._end(answering_it, chunks)
        except TimeoutError:
            late = Refusal(ErrorCode.DEADLINE_EXCEEDED, "DeadlineExpired", "the answer took too long to write")
            if self._response is None:
                raise late from None
            await self._write(openai_responses.event(sse_error(late)))
        finally:
            if self._alive is not None:
                self._alive.cancel()
            answering_it.cancel()
            await asyncio.gather(answering_it, return_exceptions=True)
        assert self._response is not None  # noqa: S101 - without a piece there was a refusal
        await self._response.write_eof()
        return self._response

    def _hear(self, row: int, piece: Chunk | LastChunk) -> None:
        self._said.put_nowait((row, piece))

    async def _pass_on(self, chunks: Chunks, choices: int) -> None:
        """Write whatever was said until nothing more is; what was said meanwhile goes out together."""
        self._say_that_it_lives()
        while (said := await self._said.get()) is not None:
            told = b"".join(self._told(chunks, each) for each in (said, *self._waiting()))
            if self._response is None:
                await self._open()
                told = b"".join(map(chunks.first, range(choices))) + told
            if told:
                await self._write(told)

    def _say_that_it_lives(self) -> None:
        """Say so now and then: a timer an answer costs less than one a word."""
        self._alive = asyncio.get_running_loop().call_later(ALIVE_SECONDS, self._say_that_it_lives)
        if self._response is not None:
            self._said.put_nowait(ALIVE)

    def _waiting(self) -> Iterator[Said | bytes]:
        while not self._said.empty():
            said = self._said.get_nowait()
            if said is None:  # to be found again, once these are told
                self._said.put_nowait(None)
                return
            yield said

    def _told(self, chunks: Chunks, said: Said | bytes) -> bytes:
        if isinstance(said, bytes):
            return said
        row, piece = said
        if isinstance(piece, Chunk):
            return chunks.piece(row, piece)
        self._usage[row] = piece.usage
        return chunks.last(row, piece)

    async def _end(self, answered: "asyncio.Task[InferResponse]", chunks: Chunks) -> None:
        """Say how it ended: with what it took, or why there is no more."""
        try:
            await answered
        except Refusal as refusal:
            if self._response is None:
                raise
            await self._write(openai_responses.event(sse_error(refusal)))
        else:
            await self._write(chunks.end([self._usage[row] for row in sorted(self._usage)]))

    async def _open(self) -> None:
        self._response = web.StreamResponse(headers=self._headers)
        await self._response.prepare(self._request)

    async def _write(self, told: bytes) -> None:
        assert self._response is not None  # noqa: S101 - nothing is told before it is open
        if len(told) < _AT_ONCE_BYTES and _nothing_waits(self._request):
            await self._response.write(told)
        else:
            await require_timely_read(self._request, self._response.write(told))


def _nothing_waits(request: web.BaseRequest) -> bool:
    """Whether the caller has read all that was sent; a little more is then sent without waiting for him."""
    return request.transport is not None and request.transport.get_write_buffer_size() == 0


def sse_error(refusal: Refusal) -> openai_responses.Json:
    """A refusal in the form of OpenAI's errors."""
    cause = refusal.__cause__
    param, code = (cause.param, cause.code) if isinstance(cause, InvalidChat) else (None, None)
    return openai_responses.error(refusal.code.value, refusal.message, reason=refusal.reason, param=param, code=code)
