"""The phases: cancels at random points, the same image from many, an image seen before, chats side by side, pulls."""

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
from trimtab_training.lmm_digits.chat_samples import Chat, ChatSource

CANCEL_STREAMS: Final = 16
WARM_CANCELS: Final = 1_000
LONGEST_WAIT_SECONDS: Final = 0.06
ZERO_SECONDS: Final = 5.0
SAME_IMAGE_CALLERS: Final = 50
SAME_IMAGES: Final = 20
FIRST_WORDS: Final = 300
PULLED_ROWS, PULLED_WIDTH, PULLS = 7_290, 3_584, 8
"""An image of 896 pixels of LLaVA-OneVision-7B."""

Advance = Callable[[], None]


async def cancels(replica: Replica, model: str, count: int, advance: Advance) -> dict[str, float]:
    """Hang up on ``count`` chats at random points, half of them streams; then look what is left."""
    source = ChatSource(seed=51)
    chats = [source.chat(index) for index in range(100)]
    await _hang_up_on_many(replica, model, chats, WARM_CANCELS, lambda: None)
    await _seconds_to_zero(replica, model)
    before, began = replica.resident_bytes, time.perf_counter()
    await _hang_up_on_many(replica, model, chats, count, advance)
    cancelled_seconds = time.perf_counter() - began
    zero_seconds = await _seconds_to_zero(replica, model)
    steps = await replica.counter("trimtab_engine_steps_total", model)
    await asyncio.sleep(0.3)
    return {
        "cancelled": count,
        "cancelled_per_second": round(count / cancelled_seconds, 1),
        "seconds_until_all_gauges_are_zero": round(zero_seconds, 4),
        "steps_after_that": await replica.counter("trimtab_engine_steps_total", model) - steps,
        "memory_growth": round(replica.resident_bytes / before - 1, 4),
    }


async def _hang_up_on_many(replica: Replica, model: str, chats: Sequence[Chat], count: int, advance: Advance) -> None:
    left = iter(range(count))

    async def caller() -> None:
        for number in left:
            request = request_of(chats[number % len(chats)], model, max_tokens=200, ignore_eos=True)
            await _hang_up(replica, request, stream=number % 2 == 0, after=random.random())  # noqa: S311 - no secret
            advance()

    await asyncio.gather(*(caller() for _ in range(CANCEL_STREAMS)))


async def _hang_up(replica: Replica, request: InferRequest, *, stream: bool, after: float) -> None:
    """Close the connection before the answer, or after some words of it."""

    async def listen() -> None:
        async with replica.post(request, "generate_stream" if stream else "infer") as answer:
            async for _ in answer.content:
                pass

    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(listen(), after * LONGEST_WAIT_SECONDS)


async def _seconds_to_zero(replica: Replica, model: str) -> float:
    began = time.perf_counter()
    while any((await replica.pending(model)).values()):
        if time.perf_counter() - began > ZERO_SECONDS:
            break
        await asyncio.sleep(0.002)
    return time.perf_counter() - began


async def same_image(replica: Replica, model: str) -> dict[str, float]:
    """Many callers show the same new image at one instant: how often it is encoded, and again by another tenant."""
    source = ChatSource(seed=52, pages=(1, 1))
    before = await replica.counter("trimtab_encoded_images_total", model)
    for index in range(SAME_IMAGES):
        request = request_of(source.chat(index), model, tenant="one")
        await asyncio.gather(*(replica.answer(request) for _ in range(SAME_IMAGE_CALLERS)))
    shared = await replica.counter("trimtab_encoded_images_total", model) - before
    await replica.answer(request_of(source.chat(0), model, tenant="other"))
    alone = await replica.counter("trimtab_encoded_images_total", model) - before - shared
    return {
        "callers_of_each_image": SAME_IMAGE_CALLERS,
        "encodes_per_image": shared / SAME_IMAGES,
        "encodes_for_another_tenant": alone,
    }


async def seen_before(replica: Replica, model: str) -> dict[str, float]:
    """The first word about an image that is in the cache, beside the first word about none, one caller at a time."""
    chat = ChatSource(seed=53, pages=(1, 1)).chat(0)
    text = Chat(chat.kind, chat.messages.replace(b'{"type": "image"}, ', b""), (), "")
    seconds: dict[str, list[float]] = {"text": [], "hit": []}
    for _ in range(FIRST_WORDS):
        for name, asked in (("text", text), ("hit", chat)):
            seconds[name].append(await _first_word(replica, request_of(asked, model, max_tokens=2)))
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return {
        "text_first_word_ms": round(1e3 * medians["text"], 3),
        "hit_first_word_ms": round(1e3 * medians["hit"], 3),
        "hit_over_text": round(medians["hit"] / medians["text"], 3),
    }


async def _first_word(replica: Replica, request: InferRequest) -> float:
    began, first = time.perf_counter(), 0.0
    async for _ in replica.events(request):
        first = first or time.perf_counter() - began
    return first


async def side_by_side(replica: Replica, model: str, count: int) -> dict[str, float]:
    """Chats about different pages, 16 at once, answered as each is alone: no answer about another's image."""
    source = ChatSource(seed=54)
    chats = [source.chat(index) for index in range(count)]
    requests = [request_of(chat, model) for chat in chats]
    alone = [await replica.answer(request) for request in requests]
    gate = asyncio.Semaphore(CANCEL_STREAMS)

    async def ask(request: InferRequest) -> str:
        async with gate:
            return await replica.answer(request)

    together = await asyncio.gather(*(ask(request) for request in requests))
    return {
        "chats": count,
        "answered_otherwise_than_alone": sum(one != other for one, other in zip(alone, together, strict=True)),
        "right_answers": round(sum(one == chat.answer for one, chat in zip(together, chats, strict=True)) / count, 4),
    }


class _Keeper:
    """Keeps embeddings as an encoder does."""

    def __init__(self) -> None:
        self.embeddings = EmbeddingStore(2**40)

    def add_names(self, names: Sequence[str], of: str | ImageIdentity) -> dict[str, object]:
        """Keep under further names what is kept; of images it has nothing cached."""
        if not isinstance(of, str):
            raise RefusalError(404, "nothing is cached of images here")
        self.embeddings.add_names(of, names)
        return {"stored": len(names)}

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Give what is kept under the path's last part."""
        keeper: Any = self
        return await embeddings(request, keeper, "encode", request.path.rpartition("/")[2])


async def pulls() -> dict[str, float]:
    """How fast embeddings of a large image are pulled on loopback, checksum included; one core for both sides."""
    keeper, rows = _Keeper(), torch.randn(PULLED_ROWS, PULLED_WIDTH)
    runner = web.ServerRunner(web.Server(keeper.answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    puller, seconds = EmbeddingClient(), []
    for number in range(PULLS):
        keeper.embeddings.expect(str(number))
        keeper.embeddings.put(str(number), ImageEmbedding(rows, ""))
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v2/models/encode/embeddings/{number}"
        began = time.perf_counter()
        await puller.fetch(url, [EmbeddingRequest(0, PULLED_ROWS)])
        seconds.append(time.perf_counter() - began)
    await puller.close()
    await runner.cleanup()
    return {
        "pulled_megabytes": round(rows.nbytes / 1e6, 1),
        "pulled_gigabytes_per_second": round(rows.nbytes / 1e9 / statistics.median(seconds), 3),
    }
