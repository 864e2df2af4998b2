"""The data port's part for models that chat: streams, counts, what is pending, and embeddings to be pulled."""

import contextlib
import logging
import zlib
from collections.abc import AsyncGenerator, Sequence

import torch
from aiohttp import web

from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.chat import messages as chat_words
from trimtab_model_servers.chat.embedding_client import CHECKSUM, ROWS, WIDTH
from trimtab_model_servers.chat.embedding_store import StoredEmbedding
from trimtab_model_servers.chat.responses import STREAM_TYPE, FinishEvent, TokenEvent, error_line, line
from trimtab_model_servers.errors import RefusalError
from trimtab_model_servers.interfaces import Awaiting, CountsTokens, KeepsEmbeddings, Pricing, ServedModel, ServesChat
from trimtab_protocol import InferRequest
from trimtab_protocol.chat.internal_wire import kept_together
from trimtab_protocol.rest import BINARY_CONTENT_TYPE

log = logging.getLogger(__name__)
_NO_BUFFERING = {"Content-Type": STREAM_TYPE, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_WRITE_BYTES = 2**20
_SHORT_BYTES = 2**20


async def stream(
    request: web.BaseRequest, model: ServedModel, asked: InferRequest, worker: BatchWorker
) -> web.StreamResponse:
    """Answer a chat by server-sent events; what is refused before the first has a status instead."""
    if not isinstance(model, ServesChat):
        raise RefusalError(404, f"model {asked.model_name!r} does not write; ask it at /infer")
    async with contextlib.aclosing(model.stream(asked, worker)) as words:
        first = await anext(words)
        response = web.StreamResponse(headers=_NO_BUFFERING)
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(line(first))
        await _rest(response, words)
    await response.write_eof()
    return response


def count(model: ServedModel, asked: InferRequest) -> dict[str, object]:
    """Tell what a chat would cost."""
    if not isinstance(model, Pricing):
        raise RefusalError(404, f"model {asked.model_name!r} does not chat; there is nothing to count")
    return model.count(asked).model_dump(exclude_none=True)


def pending(model: ServedModel, name: str) -> dict[str, int]:
    """Tell what is in flight."""
    if not isinstance(model, CountsTokens):
        raise RefusalError(404, f"model {name!r} does not chat; it counts no tokens")
    return model.pending()


async def embeddings(request: web.BaseRequest, model: ServedModel, name: str, kept: str) -> web.StreamResponse:
    """Give what is kept under names, once it is there, or drop it."""
    if not isinstance(model, KeepsEmbeddings):
        raise RefusalError(404, f"model {name!r} keeps no embeddings")
    names = kept_together(kept)
    if request.method == "DELETE":
        return web.json_response({"dropped": sum(map(model.kept.drop, names))})
    if request.method == "POST":
        return web.json_response(model.keep_also(names, chat_words.read_shared(await _short(request))))
    if request.method != "GET":
        raise RefusalError(405, f"{request.method} {request.path}: embeddings take GET, POST or DELETE")
    held = await model.kept.give(names)
    return await _send(
        request, held, [one.rows.contiguous().view(torch.uint8).numpy().reshape(-1).data for one in held]
    )


async def references(request: web.BaseRequest, model: ServedModel, name: str, asked: str) -> web.StreamResponse:
    """Take what is told of images that a chat waits for."""
    if not isinstance(model, Awaiting):
        raise RefusalError(404, f"model {name!r} waits for no images")
    if request.method != "POST":
        raise RefusalError(405, f"{request.method} {request.path}: references take POST")
    arrived = chat_words.read_arrived(await _short(request))
    model.coming.tell(asked, arrived)
    return web.json_response({"told": len(arrived)})


async def _short(request: web.BaseRequest) -> bytes:
    """A body of a few lines."""
    body = await request.content.read(_SHORT_BYTES + 1)
    while len(body) <= _SHORT_BYTES and (more := await request.content.read(_SHORT_BYTES)):
        body += more
    if len(body) > _SHORT_BYTES:
        raise RefusalError(413, f"{request.path} takes at most {_SHORT_BYTES:,} bytes")
    return body


async def _send(
    request: web.BaseRequest, held: Sequence[StoredEmbedding], raw: Sequence[memoryview]
) -> web.StreamResponse:
    """Write one after the other; what is small in one write, so that it needs no second packet."""
    headers = {
        "Content-Type": BINARY_CONTENT_TYPE,
        ROWS: ",".join(str(len(one.rows)) for one in held),
        WIDTH: str(held[0].rows.shape[1]),
        CHECKSUM: ",".join(f"{zlib.crc32(one):08x}" for one in raw),
    }
    total = sum(map(len, raw))
    if total <= _WRITE_BYTES:
        return web.Response(body=b"".join(raw), headers=headers)
    response = web.StreamResponse(headers=headers)
    response.content_length = total
    await response.prepare(request)
    for one in raw:
        for start in range(0, len(one), _WRITE_BYTES):
            await response.write(one[start : start + _WRITE_BYTES])
    await response.write_eof()
    return response


async def _rest(response: web.StreamResponse, words: AsyncGenerator[TokenEvent | FinishEvent, None]) -> None:
    """Write what follows the first word, or why it will not follow."""
    try:
        async for word in words:
            await response.write(line(word))
    except RefusalError as refusal:
        await response.write(error_line(refusal.status_code, str(refusal), getattr(refusal, "image", None)))
    except ConnectionError:
        raise  # nobody is left to tell
    except Exception as error:
        log.exception("a stream failed")
        await response.write(error_line(500, f"{type(error).__name__}: {error}"))
