"""Chat routes of the data port: streams, token counts, load, embeddings, and pending images."""

import contextlib
import logging
import zlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.chat import messages
from trimtab_model_servers.chat.messages import CHECKSUM, ROWS, WIDTH
from trimtab_model_servers.errors import RefusalError
from trimtab_model_servers.server.interfaces import GeneratesText, ServedModel, ServesChats, StoresEmbeddings
from trimtab_protocol import Buffer, InferRequest
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk, StreamFailure, dump_event, expand_embedding_ids
from trimtab_protocol.rest import BINARY_CONTENT_TYPE

if TYPE_CHECKING:
    from trimtab_model_servers.chat.interfaces import ImageEmbedding

log = logging.getLogger(__name__)
_STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_WRITE_BYTES = 2**20
_MAX_JSON_BYTES = 2**20


async def stream(
    request: web.BaseRequest, model: ServedModel, infer_request: InferRequest, worker: BatchWorker
) -> web.StreamResponse:
    """Answer a chat by server-sent events; an error before the first event is returned as a status."""
    if not isinstance(model, GeneratesText):
        raise RefusalError(404, f"model {infer_request.model_name!r} does not generate text; use /infer")
    async with contextlib.aclosing(model.stream(infer_request, worker)) as events:
        first = await anext(events)
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(dump_event(first))
        await _write_events(response, events)
    await response.write_eof()
    return response


async def count(model: ServedModel, infer_request: InferRequest) -> dict[str, object]:
    if not isinstance(model, ServesChats):
        raise RefusalError(404, f"model {infer_request.model_name!r} is no chat model; it counts no tokens")
    return (await model.count(infer_request)).model_dump(exclude_none=True)


def pending(model: ServedModel, name: str) -> dict[str, int]:
    if not isinstance(model, ServesChats):
        raise RefusalError(404, f"model {name!r} is no chat model; it counts no tokens")
    return model.pending()


async def embeddings(request: web.BaseRequest, model: ServedModel, name: str, ids: str) -> web.StreamResponse:
    """Return stored embeddings once they are there (GET), drop them (DELETE), or add names to them (POST)."""
    if not isinstance(model, StoresEmbeddings):
        raise RefusalError(404, f"model {name!r} stores no embeddings")
    names = expand_embedding_ids(ids)
    if request.method == "DELETE":
        return web.json_response({"dropped": sum(map(model.embeddings.drop, names))})
    if request.method == "POST":
        return web.json_response(model.add_names(names, messages.read_share_request(await _read_json(request))))
    if request.method != "GET":
        raise RefusalError(405, f"{request.method} {request.path}: embeddings take GET, POST or DELETE")
    return await _send_embeddings(request, await model.embeddings.take(names))


async def references(request: web.BaseRequest, model: ServedModel, name: str, request_id: str) -> web.StreamResponse:
    if not isinstance(model, GeneratesText):
        raise RefusalError(404, f"model {name!r} awaits no images")
    if request.method != "POST":
        raise RefusalError(405, f"{request.method} {request.path}: references take POST")
    images = messages.read_arrived(await _read_json(request))
    model.pending_images.resolve(request_id, images)
    return web.json_response({"resolved": len(images)})


async def _read_json(request: web.BaseRequest) -> bytes:
    body = await request.content.read(_MAX_JSON_BYTES + 1)
    while len(body) <= _MAX_JSON_BYTES and (chunk := await request.content.read(_MAX_JSON_BYTES)):
        body += chunk
    if len(body) > _MAX_JSON_BYTES:
        raise RefusalError(413, f"{request.path} takes at most {_MAX_JSON_BYTES:,} bytes")
    return body


async def _send_embeddings(request: web.BaseRequest, stored: "Sequence[ImageEmbedding]") -> web.StreamResponse:
    """Send embeddings one after the other; small ones in a single write, so that they need no second packet."""
    raw = [embedding.data for embedding in stored]
    headers = {
        "Content-Type": BINARY_CONTENT_TYPE,
        ROWS: ",".join(str(len(embedding.rows)) for embedding in stored),
        WIDTH: str(stored[0].rows.shape[1]),
        CHECKSUM: ",".join(f"{zlib.crc32(data):08x}" for data in raw),
    }
    chunks = [data[start : start + _WRITE_BYTES] for data in raw for start in range(0, len(data), _WRITE_BYTES)]
    return await send_buffers(request, chunks, headers, join_below_bytes=_WRITE_BYTES)


async def send_buffers(
    request: web.BaseRequest, buffers: Sequence[Buffer], headers: Mapping[str, str], *, join_below_bytes: int
) -> web.StreamResponse:
    """Send buffers one after the other, or joined into one if they are small: a copy costs less than another write."""
    total = sum(memoryview(buffer).nbytes for buffer in buffers)
    if total <= join_below_bytes:
        return web.Response(body=b"".join(buffers), headers=headers)
    response = web.StreamResponse(headers=headers)
    response.content_length = total
    await response.prepare(request)
    for buffer in buffers:
        await response.write(buffer)
    await response.write_eof()
    return response


async def _write_events(response: web.StreamResponse, events: AsyncGenerator[Chunk | LastChunk, None]) -> None:
    """Write the events after the first one, or an error event."""
    try:
        async for event in events:
            await response.write(dump_event(event))
    except RefusalError as refusal:
        failure = StreamFailure(str(refusal), refusal.status_code, getattr(refusal, "image", None))
        await response.write(dump_event(failure))
    except ConnectionError:
        raise  # the client has disconnected
    except Exception as error:
        log.exception("a stream failed")
        await response.write(dump_event(StreamFailure(f"{type(error).__name__}: {error}", 500)))
