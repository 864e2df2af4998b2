"""Encoder scheduler, embedding cache and embedding store."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import torch
from torch import Tensor

from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.chat import embedding_store
from trimtab_model_servers.chat.embedding_store import EmbeddingStore
from trimtab_model_servers.chat.encoder_scheduler import EmbeddingCache, EncoderScheduler
from trimtab_model_servers.chat.image_decoder import ImageFile
from trimtab_model_servers.chat.interfaces import EmbeddingShape, ImageEmbedding
from trimtab_model_servers.errors import RefusalError
from trimtab_pipelines.image_tokens import ImageTokens, OneTile

ROW_BYTES = 4 * 2


class FakeEncoder:
    """Encodes a file's first byte; an empty file fails, and encoding waits while the gate is closed."""

    token_rule = OneTile(3)
    width = 2
    name = "fake"

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
    """Wait for a condition."""
    while not holds():  # noqa: ASYNC110  (set by threads)
        await asyncio.sleep(0.001)


async def hold(encoder: FakeEncoder, scheduler: EncoderScheduler, file: bytes) -> "asyncio.Task[Tensor]":
    """Start encoding an image that waits for the gate."""
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


def test_cache_is_bounded_and_evicts_least_recently_used():
    cache, rows = EmbeddingCache(2 * 3 * ROW_BYTES), ImageEmbedding(torch.zeros(3, 2), "d")
    for name in "abc":
        cache.put(("", name, True), rows)
        cache.get(("", "a", True))

    assert [cache.get(("", name, True)) is not None for name in "abc"] == [True, False, True]
    assert (cache.bytes, cache.evictions) == (2 * 3 * ROW_BYTES, 1)
    cache.put(("", "large", True), ImageEmbedding(torch.zeros(99, 2), "d"))
    assert cache.bytes == 2 * 3 * ROW_BYTES


async def test_stored_embedding_is_taken_once_and_freed():
    store, embedding = EmbeddingStore(100), ImageEmbedding(torch.zeros(3, 2), "d")
    waiting = asyncio.create_task(store.take(["a"]))
    await asyncio.sleep(0)
    store.put("a", embedding)

    assert await waiting == [embedding]
    assert (store.bytes, len(store)) == (0, 0)


async def test_names_are_taken_together_or_not_at_all():
    store, embeddings = EmbeddingStore(100), [ImageEmbedding(torch.zeros(3, 2), name) for name in "ab"]
    for name, embedding in zip("ab", embeddings, strict=True):
        store.expect(name)
        store.put(name, embedding)
    store.expect("c")
    store.fail("c", RefusalError(422, "no image"))
    with pytest.raises(RefusalError, match="no image"):
        await store.take(["a", "c"])

    assert await store.take(["b", "a"]) == embeddings[::-1]
    assert store.bytes == 0


async def test_stored_embeddings_expire_and_are_bounded():
    store = EmbeddingStore(30, ttl_seconds=0.02)
    store.expect("a")
    store.expect("b")
    store.put("a", ImageEmbedding(torch.zeros(3, 2), "d"))
    with pytest.raises(RefusalError, match="are stored already"):
        store.put("b", ImageEmbedding(torch.zeros(3, 2), "d"))
    with pytest.raises(RefusalError, match="are stored already"):
        await store.take(["b"])
    await asyncio.sleep(0.05)

    assert (store.bytes, len(store)) == (0, 0)


async def test_embedding_for_dropped_name_is_not_stored():
    store = EmbeddingStore(100)
    store.expect("a")
    store.drop("a")
    store.put("a", ImageEmbedding(torch.zeros(3, 2), "d"))
    assert (store.bytes, len(store)) == (0, 0)


async def test_cancelled_wait_leaves_nothing():
    store = EmbeddingStore(100)
    waiting = asyncio.create_task(store.take(["never"]))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert len(store) == 0


async def test_dropped_or_fetched_name_fails_at_once():
    store = EmbeddingStore(100)
    for name in ("dropped", "given"):
        store.expect(name)
        store.put(name, ImageEmbedding(torch.zeros(3, 2), "d"))
    store.drop("dropped")
    await store.take(["given"])

    for name in ("dropped", "given"):
        async with asyncio.timeout(1.0):
            with pytest.raises(RefusalError, match="was dropped, or fetched already") as reported:
                await store.take([name])
        assert reported.value.status_code == 410
        with pytest.raises(RefusalError, match=name):
            store.add_names(name, ["other"])
    assert (store.bytes, len(store)) == (0, 0)


async def test_number_of_remembered_dropped_names_is_bounded(monkeypatch):
    monkeypatch.setattr(embedding_store, "MAX_NAMES", 2)
    store = EmbeddingStore(100)
    for name in ("a", "b", "c"):
        store.drop(name)

    store.expect("a")
    with pytest.raises(RefusalError, match="dropped"):
        store.expect("b")


async def test_waiting_request_fails_if_name_is_dropped_or_late():
    store = EmbeddingStore(100, ttl_seconds=0.02)
    waiting = asyncio.create_task(store.take(["a"]))
    await asyncio.sleep(0)
    assert store.drop("a")
    with pytest.raises(RefusalError, match="dropped"):
        await waiting
    with pytest.raises(RefusalError, match=r"within 0\.02 s|dropped"):
        await store.take(["never"])
    assert len(store) == 0


@pytest.mark.parametrize("after", [False, True])
async def test_shared_embedding_is_taken_once_per_name_and_counts_once(after):
    store, embedding = EmbeddingStore(30), ImageEmbedding(torch.zeros(3, 2), "d")
    store.expect("a")
    if after:
        store.put("a", embedding)
    store.add_names("a", ["b", "c"])
    store.put("a", embedding)

    assert await store.take(["b"]) == [embedding]
    assert store.bytes == embedding.rows.nbytes
    assert await store.take(["a"]) == [embedding]
    assert store.drop("c")
    assert (store.bytes, len(store)) == (0, 0)


async def test_failed_name_leaves_no_further_name():
    store = EmbeddingStore(100)
    store.expect("a")
    store.add_names("a", ["b"])
    store.drop("a")
    with pytest.raises(RefusalError, match="dropped"):
        await store.take(["b"])
    assert len(store) == 0
