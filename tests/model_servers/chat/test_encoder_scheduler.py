"""Encoder scheduler and embedding cache."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import torch
from torch import Tensor

from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.chat.encoder_scheduler import EmbeddingCache, EncoderScheduler
from trimtab_model_servers.chat.image_decoder import DecodingBudget, ImageFile
from trimtab_model_servers.chat.interfaces import EmbeddingShape, ImageEmbedding
from trimtab_model_servers.errors import RefusalError
from trimtab_pipelines.image_tokens import ImageTokens, OneTile

ROW_BYTES = 4 * 2


class FakeEncoder:
    """Encodes a file's first byte; an empty file fails, and encoding waits while the gate is closed."""

    token_rule = OneTile(3)
    width = 2
    name = "fake"
    pixel_bytes = 1

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Event()
        self.batches: list[int] = []

    def embedding_shape(self, count: ImageTokens) -> EmbeddingShape:
        return EmbeddingShape(count.encoded, 0)

    def preprocess(self, file: bytes, images: int) -> Tensor:
        del images
        return torch.tensor([*file][:1])

    def encode(self, pixels: Sequence[Tensor]) -> list[Tensor]:
        self.begun.set()
        self.gate.wait(10)
        self.batches.append(len(pixels))
        if any(not len(one) for one in pixels):
            raise ValueError("empty file")
        return [one.expand(3, 2) for one in pixels]


@pytest.fixture
async def encoder() -> FakeEncoder:
    return FakeEncoder()


@pytest.fixture
async def scheduler(encoder: FakeEncoder) -> AsyncIterator[EncoderScheduler]:
    worker = BatchWorker()
    yield EncoderScheduler(encoder, worker, batch_images=4, cache_bytes=2 * 3 * ROW_BYTES)
    worker.close()


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110  (set by threads)
        await asyncio.sleep(0.001)


async def hold(encoder: FakeEncoder, scheduler: EncoderScheduler, file: bytes) -> "asyncio.Task[Tensor]":
    encoder.gate.clear()
    held = show(scheduler, file)
    await until(encoder.begun.is_set)
    return held


def show(scheduler: EncoderScheduler, file: bytes, tenant: str = "") -> "asyncio.Task[Tensor]":
    async def rows() -> Tensor:
        return (await scheduler.encode(ImageFile(file, 1, 1, str(file)), tenant)).rows

    return asyncio.create_task(rows())


async def test_identical_images_are_encoded_once(encoder: FakeEncoder, scheduler: EncoderScheduler):
    shown = await asyncio.gather(*(show(scheduler, b"a") for _ in range(20)))

    assert encoder.batches == [1]
    assert all(rows.tolist() == [[97.0, 97.0]] * 3 for rows in shown)
    assert (scheduler.counters.hits, scheduler.counters.misses, scheduler.counters.pending_tokens) == (19, 1, 0)


async def test_tenants_share_nothing(encoder: FakeEncoder, scheduler: EncoderScheduler):
    await show(scheduler, b"a", "one")
    await show(scheduler, b"a", "other")

    assert encoder.batches == [1, 1]


async def test_queued_images_are_encoded_in_a_batch(encoder: FakeEncoder, scheduler: EncoderScheduler):
    shown = [await hold(encoder, scheduler, b"a"), *(show(scheduler, bytes([number])) for number in range(5))]
    await until(lambda: scheduler.queued == 5)
    encoder.gate.set()
    await asyncio.gather(*shown)

    assert encoder.batches == [1, 4, 1]


async def test_failed_image_does_not_fail_its_batch(encoder: FakeEncoder, scheduler: EncoderScheduler):
    shown = [await hold(encoder, scheduler, b"a"), *(show(scheduler, file) for file in (b"b", b"", b"c"))]
    await until(lambda: scheduler.queued == 3)
    encoder.gate.set()
    reported = await asyncio.gather(*shown, return_exceptions=True)

    assert [isinstance(one, ValueError) for one in reported] == [False, False, True, False]
    assert scheduler.in_flight == scheduler.counters.pending_tokens == 0


async def test_abandoned_image_is_not_encoded(encoder: FakeEncoder, scheduler: EncoderScheduler):
    first, others = await hold(encoder, scheduler, b"a"), [show(scheduler, b"b") for _ in range(2)]
    await until(lambda: scheduler.queued == 1)
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    assert scheduler.in_flight == 1
    encoder.gate.set()
    await first

    assert encoder.batches == [1]
    assert scheduler.counters.pending_tokens == 0


async def test_image_beyond_the_decoding_budget_is_refused(encoder: FakeEncoder):
    worker = BatchWorker()
    budget = DecodingBudget(8 * 10)  # ten pixels of a PNG
    scheduler = EncoderScheduler(encoder, worker, 4, 0, lambda: budget)

    await scheduler.encode(ImageFile(b"a", 5, 2, "a"), "")
    with pytest.raises(RefusalError, match="image 3 takes") as refused:
        await scheduler.encode(ImageFile(b"b", 11, 1, "b"), "", 4, 3)

    worker.close()
    assert refused.value.status_code == 413
    assert (encoder.batches, scheduler.in_flight) == ([1], 0)


def test_cache_is_bounded_and_evicts_least_recently_used():
    cache, rows = EmbeddingCache(2 * 3 * ROW_BYTES), ImageEmbedding(torch.zeros(3, 2), "d")
    for name in "abc":
        cache.put(("", name, True), rows)
        cache.get(("", "a", True))

    assert [cache.get(("", name, True)) is not None for name in "abc"] == [True, False, True]
    assert (cache.bytes, cache.evictions) == (2 * 3 * ROW_BYTES, 1)
    cache.put(("", "large", True), ImageEmbedding(torch.zeros(99, 2), "d"))
    assert cache.bytes == 2 * 3 * ROW_BYTES
