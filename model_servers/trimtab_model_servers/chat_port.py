"""The data port's part for models that chat: streams, counts, what is pending, and embeddings to be pulled."""

import contextlib
import logging
import zlib
from collections.abc import AsyncGenerator

import torch
from aiohttp import web

from trimtab_model_servers.chat.pulling import CHECKSUM, DIGEST, ROWS, WIDTH
from trimtab_model_servers.chat.told import STREAM_TYPE, Last, Word, error_line, line
from trimtab_model_servers.errors import RefusalError
from trimtab_model_servers.hosting import Chatting, Counting, Hosted, Keeping, Pricing
from trimtab_model_servers.worker import BatchWorker
from trimtab_protocol import InferRequest
from trimtab_protocol.rest import BINARY_CONTENT_TYPE

log = logging.getLogger(__name__)
_NO_BUFFERING = {"Content-Type": STREAM_TYPE, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_WRITE_BYTES = 2**20


async def stream(
    request: web.BaseRequest, model: Hosted, asked: InferRequest, worker: BatchWorker
) -> web.StreamResponse:
    """Answer a chat by server-sent events; what is refused before the first has a status instead."""
    if not isinstance(model, Chatting):
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


def count(model: Hosted, asked: InferRequest) -> dict[str, object]:
    """Tell what a chat would cost."""
    if not isinstance(model, Pricing):
        raise RefusalError(404, f"model {asked.model_name!r} does not chat; there is nothing to count")
    return model.count(asked)


def pending(model: Hosted, name: str) -> dict[str, int]:
    """Tell what is in flight."""
    if not isinstance(model, Counting):
        raise RefusalError(404, f"model {name!r} does not chat; it counts no tokens")
    return model.pending()


async def embeddings(request: web.BaseRequest, model: Hosted, name: str, kept: str) -> web.StreamResponse:
    """Give what is kept under a name, once it is there, or drop it."""
    if not isinstance(model, Keeping):
        raise RefusalError(404, f"model {name!r} keeps no embeddings")
    if request.method == "DELETE":
        return web.json_response({"dropped": model.kept.drop(kept)})
    if request.method != "GET":
        raise RefusalError(405, f"{request.method} {request.path}: embeddings take GET or DELETE")
    held = await model.kept.give(kept)
    raw = held.rows.contiguous().view(torch.uint8).numpy().reshape(-1).data
    rows, width = held.rows.shape
    response = web.StreamResponse(
        headers={
            "Content-Type": BINARY_CONTENT_TYPE,
            ROWS: str(rows),
            WIDTH: str(width),
            DIGEST: held.digest,
            CHECKSUM: f"{zlib.crc32(raw):08x}",
        }
    )
    response.content_length = len(raw)
    await response.prepare(request)
    for start in range(0, len(raw), _WRITE_BYTES):
        await response.write(raw[start : start + _WRITE_BYTES])
    await response.write_eof()
    return response


async def _rest(response: web.StreamResponse, words: AsyncGenerator[Word | Last, None]) -> None:
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
