"""Measurements of one chat replica and of the embedding client."""

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from aiohttp import web

from benchmarks.chats.replica import Replica, request_of
from trimtab_model_servers.chat.embedding_client import EmbeddingClient, EmbeddingRequest
from trimtab_model_servers.chat.embedding_store import EmbeddingStore
from trimtab_model_servers.chat.interfaces import ImageEmbedding
from trimtab_model_servers.errors import RefusalError
from trimtab_model_servers.server.chat_routes import embeddings
from trimtab_protocol import InferRequest
from trimtab_protocol.chat.embedding_refs import ImageIdentity
from trimtab_training.lmm_digits.questions import Chat, ChatSource

CONCURRENCY: Final = 16
WARMUP_DISCONNECTS: Final = 1_000
MAX_DISCONNECT_SECONDS: Final = 0.06
IDLE_TIMEOUT_SECONDS: Final = 5.0
CLIENTS_PER_IMAGE: Final = 50
SHARED_IMAGES: Final = 20
FIRST_TOKENS: Final = 300
EMBEDDING_SHAPE: Final = 7_290, 3_584
"""Tokens and width of an image of 896 pixels for LLaVA-OneVision-7B."""
TRANSFERS: Final = 8

Advance = Callable[[], None]


async def measure_disconnects(replica: Replica, model: str, count: int, advance: Advance) -> dict[str, float]:
    """Disconnect from ``count`` chats at random times, half of them streamed, and measure what stays allocated."""
    source = ChatSource(seed=51)
    chats = [source.chat(index) for index in range(100)]
    await _disconnect_many(replica, model, chats, WARMUP_DISCONNECTS, lambda: None)
    await _seconds_until_idle(replica, model)
    resident_bytes, started = replica.resident_bytes, time.perf_counter()
    await _disconnect_many(replica, model, chats, count, advance)
    disconnect_seconds = time.perf_counter() - started
    idle_seconds = await _seconds_until_idle(replica, model)
    steps = await replica.counter("trimtab_engine_steps_total", model)
    await asyncio.sleep(0.3)
    return {
        "disconnects": count,
        "disconnects_per_second": round(count / disconnect_seconds, 1),
        "seconds_until_idle": round(idle_seconds, 4),
        "steps_without_requests": await replica.counter("trimtab_engine_steps_total", model) - steps,
        "memory_growth": round(replica.resident_bytes / resident_bytes - 1, 4),
    }


async def _disconnect_many(replica: Replica, model: str, chats: Sequence[Chat], count: int, advance: Advance) -> None:
    numbers = iter(range(count))

    async def run_client() -> None:
        for number in numbers:
            request = request_of(chats[number % len(chats)], model, max_tokens=200, ignore_eos=True)
            await _disconnect(replica, request, stream=number % 2 == 0, after=random.random())  # noqa: S311 - no secret
            advance()

    await asyncio.gather(*(run_client() for _ in range(CONCURRENCY)))


async def _disconnect(replica: Replica, request: InferRequest, *, stream: bool, after: float) -> None:
    """Close the connection after a share of the longest wait: before the response or amid it."""

    async def read_response() -> None:
        async with replica.post(request, "generate_stream" if stream else "infer") as response:
            async for _ in response.content:
                pass

    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(read_response(), after * MAX_DISCONNECT_SECONDS)


async def _seconds_until_idle(replica: Replica, model: str) -> float:
    began = time.perf_counter()
    while any((await replica.pending(model)).values()):
        if time.perf_counter() - began > IDLE_TIMEOUT_SECONDS:
            break
        await asyncio.sleep(0.002)
    return time.perf_counter() - began


async def measure_shared_images(replica: Replica, model: str) -> dict[str, float]:
    """Count the encodings of a new image that many clients send at once, and of one that a second tenant sends."""
    source = ChatSource(seed=52, pages=(1, 1))
    encodings_before = await replica.counter("trimtab_encoded_images_total", model)
    for index in range(SHARED_IMAGES):
        request = request_of(source.chat(index), model, tenant="one")
        await asyncio.gather(*(replica.generate(request) for _ in range(CLIENTS_PER_IMAGE)))
    shared = await replica.counter("trimtab_encoded_images_total", model) - encodings_before
    await replica.generate(request_of(source.chat(0), model, tenant="other"))
    other_tenant = await replica.counter("trimtab_encoded_images_total", model) - encodings_before - shared
    return {
        "clients_per_image": CLIENTS_PER_IMAGE,
        "encodings_per_image": shared / SHARED_IMAGES,
        "encodings_for_another_tenant": other_tenant,
    }


async def measure_cached_image(replica: Replica, model: str) -> dict[str, float]:
    """Measure the time to first token with a cached image and without an image, one request at a time."""
    chat = ChatSource(seed=53, pages=(1, 1)).chat(0)
    text = Chat(chat.kind, chat.messages.replace(b'{"type": "image"}, ', b""), (), "")
    seconds: dict[str, list[float]] = {"text": [], "cached_image": []}
    for _ in range(FIRST_TOKENS):
        for name, prompt in (("text", text), ("cached_image", chat)):
            seconds[name].append(await _first_token_seconds(replica, request_of(prompt, model, max_tokens=2)))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "text_first_token_ms": round(1e3 * medians["text"], 3),
        "cached_image_first_token_ms": round(1e3 * medians["cached_image"], 3),
        "cached_image_over_text": round(medians["cached_image"] / medians["text"], 3),
    }


async def _first_token_seconds(replica: Replica, request: InferRequest) -> float:
    began, first = time.perf_counter(), 0.0
    async for _ in replica.events(request):
        first = first or time.perf_counter() - began
    return first


async def measure_concurrent_chats(replica: Replica, model: str, count: int) -> dict[str, float]:
    """Compare the outputs of 16 concurrent chats about different pages with the output of each chat alone."""
    source = ChatSource(seed=54)
    chats = [source.chat(index) for index in range(count)]
    requests = [request_of(chat, model) for chat in chats]
    alone = [await replica.generate(request) for request in requests]
    semaphore = asyncio.Semaphore(CONCURRENCY)

    async def generate(request: InferRequest) -> str:
        async with semaphore:
            return await replica.generate(request)

    concurrent = await asyncio.gather(*(generate(request) for request in requests))
    correct = sum(output == chat.answer for output, chat in zip(concurrent, chats, strict=True))
    return {
        "chats": count,
        "differing_outputs": sum(single != output for single, output in zip(alone, concurrent, strict=True)),
        "accuracy": round(correct / count, 4),
    }


class _EmbeddingServer:
    """Serves embeddings as an encoder replica does."""

    def __init__(self) -> None:
        self.embeddings = EmbeddingStore(2**40)

    def add_names(self, names: Sequence[str], of: str | ImageIdentity) -> dict[str, object]:
        """Add names to a stored embedding; no image is cached."""
        if not isinstance(of, str):
            raise RefusalError(404, "this server caches no image")
        self.embeddings.add_names(of, names)
        return {"stored": len(names)}

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Return the embedding that the last part of the path names."""
        encoder: Any = self
        return await embeddings(request, encoder, "encode", request.path.rpartition("/")[2])


async def measure_embedding_transfer() -> dict[str, float]:
    """Measure the loopback throughput of a large image's embeddings with checksums; both ends share one process."""
    server, rows = _EmbeddingServer(), torch.randn(EMBEDDING_SHAPE)
    runner = web.ServerRunner(web.Server(server.answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client, seconds = EmbeddingClient(), []
    for number in range(TRANSFERS):
        server.embeddings.expect(str(number))
        server.embeddings.put(str(number), ImageEmbedding(rows, ""))
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v2/models/encode/embeddings/{number}"
        began = time.perf_counter()
        await client.fetch(url, [EmbeddingRequest(0, len(rows))])
        seconds.append(time.perf_counter() - began)
    await client.close()
    await runner.cleanup()
    return {
        "transfer_megabytes": round(rows.nbytes / 1e6, 1),
        "transfer_gigabytes_per_second": round(rows.nbytes / 1e9 / statistics.median(seconds), 3),
    }
