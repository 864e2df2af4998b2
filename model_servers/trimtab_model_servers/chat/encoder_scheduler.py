"""`EncoderScheduler`: encodes images in batches, each image once, and caches the embeddings by content.

A request for an image that is being encoded for the same tenant joins that encoding. An image that no request waits for
any longer is not encoded.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.chat.image_decoder import BadImage, DecodingBudget, ImageFile, process_budget
from trimtab_model_servers.chat.interfaces import EmbeddingShape, ImageEmbedding, VisionEncoder
from trimtab_pipelines.image_tokens import ImageTokens
from trimtab_protocol.chat.internal_wire import content_id

PREPROCESSING_THREADS = 2
Key = tuple[str, str, bool]
"""Tenant, digest of the image, and whether it is alone in its chat: some models split only such an image into tiles."""


@dataclass(slots=True)
class EncoderCounters:
    """Totals since the start, and the image tokens still to be encoded."""

    encoded_images: int = 0
    hits: int = 0
    misses: int = 0
    pending_tokens: int = 0
    encode_seconds: float = 0.0


class EmbeddingCache:
    """LRU cache of embeddings, bounded in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, ImageEmbedding] = OrderedDict()
        self.bytes = 0
        self.evictions = 0

    def get(self, key: Key) -> ImageEmbedding | None:
        embedding = self._entries.get(key)
        if embedding is not None:
            self._entries.move_to_end(key)
        return embedding

    def put(self, key: Key, embedding: ImageEmbedding) -> None:
        """Cache embeddings, evicting others; ignored if they are larger than the cache."""
        nbytes = embedding.rows.nbytes
        if nbytes > self._max_bytes or key in self._entries:
            return
        while self.bytes + nbytes > self._max_bytes:
            _, evicted = self._entries.popitem(last=False)
            self.bytes -= evicted.rows.nbytes
            self.evictions += 1
        self._entries[key] = embedding
        self.bytes += nbytes


@dataclass(slots=True, eq=False)
class _Encoding:
    """An image that is being encoded, and the number of requests that wait for it."""

    task: "asyncio.Task[ImageEmbedding]"
    waiting: int = 0


class EncoderScheduler:
    """Queue, batches and cache of one encoder; for one event loop. ``worker`` computes."""

    def __init__(
        self,
        encoder: VisionEncoder,
        worker: BatchWorker,
        batch_images: int,
        cache_bytes: int,
        decoding_budget: Callable[[], DecodingBudget] = process_budget,
    ) -> None:
        self.encoder = encoder
        self.counters = EncoderCounters()
        self._worker = worker
        self._preprocessors = ThreadPoolExecutor(PREPROCESSING_THREADS, thread_name_prefix="preprocessing")
        self._decoding_budget = decoding_budget
        self._batch_images = batch_images
        self._cache = EmbeddingCache(cache_bytes)
        self._encodings: dict[Key, _Encoding] = {}
        self._queue: deque[tuple[Any, asyncio.Future[Tensor]]] = deque()
        self._batch_loop: asyncio.Task[None] | None = None

    @property
    def in_flight(self) -> int:
        return len(self._encodings)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def cached(self, file_digest: str, tenant: str, *, alone: bool) -> ImageEmbedding | None:
        embedding = self._cache.get((tenant, file_digest, alone))
        self.counters.hits += embedding is not None
        return embedding

    def totals(self) -> dict[str, float]:
        counters = self.counters
        return {
            "encoded_images": counters.encoded_images,
            "encode_seconds": counters.encode_seconds,
            "cache_hits": counters.hits,
            "cache_misses": counters.misses,
            "cache_evictions": self._cache.evictions,
        }

    def embedding_shape(self, image: ImageFile, images: int) -> EmbeddingShape:
        return self.encoder.embedding_shape(self._tokens(image, images))

    async def encode(self, image: ImageFile, tenant: str, images: int = 1, number: int = 0) -> ImageEmbedding:
        """Encode the image of a number in a chat, in FP32, or take it from the cache; raises RefusalError."""
        key = tenant, image.digest, images == 1
        embedding = self.cached(image.digest, tenant, alone=images == 1)
        if embedding is not None:
            return embedding
        encoding = self._encodings.get(key)
        if encoding is None:
            self.counters.misses += 1
            encoding = _Encoding(asyncio.create_task(self._encode_image(key, image, images)))
            self._encodings[key] = encoding
        else:
            self.counters.hits += 1
        encoding.waiting += 1
        try:
            return await asyncio.shield(encoding.task)
        except BadImage as bad:
            raise bad.with_number(number) from bad
        finally:
            encoding.waiting -= 1
            if not encoding.waiting and not encoding.task.done():
                self._encodings.pop(key, None)
                encoding.task.cancel()

    def _tokens(self, image: ImageFile, images: int) -> ImageTokens:
        return self.encoder.token_rule.count(image.width_px, image.height_px, images=images)

    def _preprocess(self, image: ImageFile, images: int, budget: DecodingBudget) -> Any:
        with budget.hold(image.decoding_bytes(self.encoder.pixel_bytes)):
            return self.encoder.preprocess(image.content, images)

    async def _encode_image(self, key: Key, image: ImageFile, images: int) -> ImageEmbedding:
        count, encoder = self._tokens(image, images), self.encoder
        self.counters.pending_tokens += count.encoded
        try:
            loop = asyncio.get_running_loop()
            budget = self._decoding_budget()
            pixels = await loop.run_in_executor(self._preprocessors, self._preprocess, image, images, budget)
            future: asyncio.Future[Tensor] = loop.create_future()
            self._queue.append((pixels, future))
            if self._batch_loop is None:
                self._batch_loop = asyncio.create_task(self._encode_queue())
            rows = await future
            digest = content_id(encoder.name, image.digest, len(rows))
            embedding = ImageEmbedding(rows, digest, encoder.embedding_shape(count).columns)
            self._cache.put(key, embedding)
            return embedding
        finally:
            self.counters.pending_tokens -= count.encoded
            encoding = self._encodings.get(key)
            if encoding is not None and encoding.task is asyncio.current_task():
                del self._encodings[key]

    async def _encode_queue(self) -> None:
        try:
            while self._queue:
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._batch_images))]
                awaited = [(pixels, rows) for pixels, rows in batch if not rows.cancelled()]
                if awaited:
                    await self._encode_batch([pixels for pixels, _ in awaited], [rows for _, rows in awaited])
        finally:
            self._batch_loop = None

    async def _encode_batch(self, pixels: list[Any], futures: Sequence["asyncio.Future[Tensor]"]) -> None:
        """Encode one batch; a failed batch is retried image by image, so that only the faulty image fails."""
        loop, encoder = asyncio.get_running_loop(), self.encoder
        began = loop.time()
        try:
            embeddings = await self._worker.run(lambda: _compute(encoder, pixels))
        except Exception as error:  # noqa: BLE001  (passed to the waiting requests)
            if len(futures) == 1:
                if not futures[0].done():
                    futures[0].set_exception(error)
                return
            for image, future in zip(pixels, futures, strict=True):
                await self._encode_batch([image], [future])
            return
        self.counters.encode_seconds += loop.time() - began
        self.counters.encoded_images += len(embeddings)
        for rows, future in zip(embeddings, futures, strict=True):
            if not future.done():
                future.set_result(rows)


def _compute(encoder: VisionEncoder, pixels: Sequence[Any]) -> list[Tensor]:
    with torch.inference_mode():
        return [rows.float().contiguous() for rows in encoder.encode(pixels)]
