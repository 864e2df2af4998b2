"""An image is encoded once for all who show it, never shared between tenants, and not at all once nobody waits."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.chat import keyed_futures
from trimtab_model_servers.chat.embedding_store import EmbeddingStore, StoredEmbedding
from trimtab_model_servers.chat.encoder_scheduler import EmbeddingCache, EncoderLimits, EncoderScheduler, ImageEmbedding
from trimtab_model_servers.chat.image_decoder import Header
from trimtab_model_servers.chat.interfaces import EmbeddingShape
from trimtab_model_servers.errors import RefusalError
from trimtab_pipelines.image_tokens import ImageTokens, OneTile

ROW_BYTES = 4 * 2


class Eye:
    """Encodes a file's first byte; a file of nothing fails, and all wait while its gate is shut."""

    token_rule = OneTile(3)
    width = 2
    name = "eye"

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
            raise ValueError("nothing to see")
        return [one.expand(3, 2) for one in pixels]


@pytest.fixture
async def eye() -> Eye:
    return Eye()


@pytest.fixture
async def encoding(eye: Eye) -> AsyncIterator[EncoderScheduler]:
    worker = BatchWorker()
    with ThreadPoolExecutor(1) as openers:
        yield EncoderScheduler(eye, worker, openers, EncoderLimits(batch_images=4, cache_bytes=2 * 3 * ROW_BYTES))
    worker.close()


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    while not holds():  # noqa: ASYNC110 - of threads
        await asyncio.sleep(0.001)


async def hold(eye: Eye, encoding: EncoderScheduler, file: bytes) -> "asyncio.Task[Tensor]":
    """Have an image encoded that is not done before the gate opens."""
    eye.gate.clear()
    held = show(encoding, file)
    await until(eye.begun.is_set)
    return held


def show(encoding: EncoderScheduler, file: bytes, tenant: str = "") -> "asyncio.Task[Tensor]":
    async def rows() -> Tensor:
        return (await encoding.encode(file, Header(1, 1, str(file)), tenant)).rows

    return asyncio.create_task(rows())


async def test_identical_images_are_encoded_once(eye: Eye, encoding: EncoderScheduler):
    shown = await asyncio.gather(*(show(encoding, b"a") for _ in range(20)))

    assert eye.batches == [1]
    assert all(rows.tolist() == [[97.0, 97.0]] * 3 for rows in shown)
    assert (encoding.counters.hits, encoding.counters.misses, encoding.counters.pending_tokens) == (19, 1, 0)


async def test_tenants_share_nothing(eye: Eye, encoding: EncoderScheduler):
    await show(encoding, b"a", "one")
    await show(encoding, b"a", "other")

    assert eye.batches == [1, 1]


async def test_queued_images_are_encoded_in_a_batch(eye: Eye, encoding: EncoderScheduler):
    shown = [await hold(eye, encoding, b"a"), *(show(encoding, bytes([number])) for number in range(5))]
    await until(lambda: encoding.queued == 5)
    eye.gate.set()
    await asyncio.gather(*shown)

    assert eye.batches == [1, 4, 1]


async def test_failed_image_does_not_fail_its_batch(eye: Eye, encoding: EncoderScheduler):
    shown = [await hold(eye, encoding, b"a"), *(show(encoding, file) for file in (b"b", b"", b"c"))]
    await until(lambda: encoding.queued == 3)
    eye.gate.set()
    told = await asyncio.gather(*shown, return_exceptions=True)

    assert [isinstance(one, ValueError) for one in told] == [False, False, True, False]
    assert encoding.in_flight == encoding.counters.pending_tokens == 0


async def test_abandoned_image_is_not_encoded(eye: Eye, encoding: EncoderScheduler):
    first, others = await hold(eye, encoding, b"a"), [show(encoding, b"b") for _ in range(2)]
    await until(lambda: encoding.queued == 1)
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    assert encoding.in_flight == 1
    eye.gate.set()
    await first

    assert eye.batches == [1]
    assert encoding.counters.pending_tokens == 0


def test_cache_is_bounded_and_evicts_least_recently_used():
    cache, rows = EmbeddingCache(2 * 3 * ROW_BYTES), ImageEmbedding(torch.zeros(3, 2))
    for name in "abc":
        cache.put(("", name, True), rows)
        cache.get(("", "a", True))

    assert [cache.get(("", name, True)) is not None for name in "abc"] == [True, False, True]
    assert (cache.bytes, cache.evictions) == (2 * 3 * ROW_BYTES, 1)
    cache.put(("", "large", True), ImageEmbedding(torch.zeros(99, 2)))
    assert cache.bytes == 2 * 3 * ROW_BYTES


async def test_stored_embedding_is_taken_once_and_freed():
    kept, held = EmbeddingStore(100), StoredEmbedding(torch.zeros(3, 2), "d")
    waiting = asyncio.create_task(kept.take(["a"]))
    await asyncio.sleep(0)
    kept.put("a", held)

    assert await waiting == [held]
    assert (kept.bytes, len(kept)) == (0, 0)


async def test_names_are_taken_together_or_not_at_all():
    kept, held = EmbeddingStore(100), [StoredEmbedding(torch.zeros(3, 2), name) for name in "ab"]
    for name, one in zip("ab", held, strict=True):
        kept.expect(name)
        kept.put(name, one)
    kept.expect("c")
    kept.fail("c", RefusalError(422, "no image"))
    with pytest.raises(RefusalError, match="no image"):
        await kept.take(["a", "c"])

    assert await kept.take(["b", "a"]) == held[::-1]
    assert kept.bytes == 0


async def test_stored_embeddings_expire_and_are_bounded():
    kept = EmbeddingStore(30, ttl_seconds=0.02)
    kept.expect("a")
    kept.expect("b")
    kept.put("a", StoredEmbedding(torch.zeros(3, 2), "d"))
    with pytest.raises(RefusalError, match="are stored already"):
        kept.put("b", StoredEmbedding(torch.zeros(3, 2), "d"))
    with pytest.raises(RefusalError, match="are stored already"):
        await kept.take(["b"])
    await asyncio.sleep(0.05)

    assert (kept.bytes, len(kept)) == (0, 0)


async def test_embedding_for_dropped_name_is_not_stored():
    kept = EmbeddingStore(100)
    kept.expect("a")
    kept.drop("a")
    kept.put("a", StoredEmbedding(torch.zeros(3, 2), "d"))
    assert (kept.bytes, len(kept)) == (0, 0)


async def test_cancelled_wait_leaves_nothing():
    kept = EmbeddingStore(100)
    waiting = asyncio.create_task(kept.take(["never"]))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert len(kept) == 0


async def test_dropped_or_fetched_name_fails_at_once():
    """The one who wanted it left, and whoever pulls for him does not know it yet."""
    kept = EmbeddingStore(100)
    for name in ("dropped", "given"):
        kept.expect(name)
        kept.put(name, StoredEmbedding(torch.zeros(3, 2), "d"))
    kept.drop("dropped")
    await kept.take(["given"])

    for name in ("dropped", "given"):
        async with asyncio.timeout(1.0):
            with pytest.raises(RefusalError, match="was dropped, or fetched already") as told:
                await kept.take([name])
        assert told.value.status_code == 410
        with pytest.raises(RefusalError, match=name):
            kept.add_names(name, ["other"])
    assert (kept.bytes, len(kept)) == (0, 0)


async def test_number_of_remembered_dropped_names_is_bounded(monkeypatch):
    monkeypatch.setattr(keyed_futures, "MAX_NAMES", 2)
    kept = EmbeddingStore(100)
    for name in ("a", "b", "c"):
        kept.drop(name)

    kept.expect("a")
    with pytest.raises(RefusalError, match="dropped"):
        kept.expect("b")


async def test_waiting_request_fails_if_name_is_dropped_or_late():
    kept = EmbeddingStore(100, ttl_seconds=0.02)
    waiting = asyncio.create_task(kept.take(["a"]))
    await asyncio.sleep(0)
    assert kept.drop("a")
    with pytest.raises(RefusalError, match="dropped"):
        await waiting
    with pytest.raises(RefusalError, match=r"within 0\.02 s|dropped"):
        await kept.take(["never"])
    assert len(kept) == 0


@pytest.mark.parametrize("after", [False, True])
async def test_shared_embedding_is_taken_once_per_name_and_counts_once(after):
    kept, held = EmbeddingStore(30), StoredEmbedding(torch.zeros(3, 2), "d")
    kept.expect("a")
    if after:
        kept.put("a", held)
    kept.add_names("a", ["b", "c"])
    kept.put("a", held)

    assert await kept.take(["b"]) == [held]
    assert kept.bytes == held.rows.nbytes
    assert await kept.take(["a"]) == [held]
    assert kept.drop("c")
    assert (kept.bytes, len(kept)) == (0, 0)


async def test_failed_name_leaves_no_further_name():
    kept = EmbeddingStore(100)
    kept.expect("a")
    kept.add_names("a", ["b"])
    kept.drop("a")
    with pytest.raises(RefusalError, match="dropped"):
        await kept.take(["b"])
    assert len(kept) == 0
