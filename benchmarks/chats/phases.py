"""Measurements of one chat replica."""

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

from benchmarks.chats.replica import Replica, request_of
from trimtab_protocol import InferRequest
from trimtab_training.lmm_digits.questions import Chat, ChatSource

CONCURRENCY: Final = 16
WARMUP_DISCONNECTS: Final = 1_000
MAX_DISCONNECT_SECONDS: Final = 0.06
IDLE_TIMEOUT_SECONDS: Final = 5.0
CLIENTS_PER_IMAGE: Final = 50
SHARED_IMAGES: Final = 20
FIRST_TOKENS: Final = 300

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
