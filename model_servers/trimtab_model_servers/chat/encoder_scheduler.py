"""Images encoded once each: opened by threads of their own, encoded in batches, kept by content as long as room lasts.

Who asks for an image that is being encoded for another of the same tenant waits for that one. When nobody waits any
more, what has not begun is not done.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.chat.image_decoder import Header
from trimtab_model_servers.chat.interfaces import VisionEncoder

Key = tuple[str, str, bool]
"""A tenant, what an image shows, and whether it is alone in its chat: some models cut only such an image into tiles."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What an encoder takes at once, and what it keeps."""

    batch_images: int = 8
    cache_bytes: int = 64 * 2**20


@dataclass(slots=True)
class Counts:
    """What happened since the start, and how many tokens of images are still to be encoded."""

    encoded_images: int = 0
    hits: int = 0
    misses: int = 0
    pending_tokens: int = 0
    encode_seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """An image's embeddings, [rows, width], and into how many columns of tiles it was cut; 0 where none is told."""

    rows: Tensor
    columns: int = 0


class EmbeddingCache:
    """Embeddings by tenant and content, the ones least lately used given up first; never above its bytes."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._held: OrderedDict[Key, Encoded] = OrderedDict()
        self.bytes = 0
        self.evictions = 0

    def get(self, key: Key) -> Encoded | None:
        """What is held under a key."""
        found = self._held.get(key)
        if found is not None:
            self._held.move_to_end(key)
        return found

    def put(self, key: Key, encoded: Encoded) -> None:
        """Hold what fits at all, and give up others for it."""
        nbytes = encoded.rows.nbytes
        if nbytes > self._most_bytes or key in self._held:
            return
        while self.bytes + nbytes > self._most_bytes:
            _, given_up = self._held.popitem(last=False)
            self.bytes -= given_up.rows.nbytes
            self.evictions += 1
        self._held[key] = encoded
        self.bytes += nbytes


@dataclass(slots=True, eq=False)
class _InFlight:
    """An image on its way, and how many wait for it."""

    task: "asyncio.Task[Encoded]"
    waiting: int = 0


class EncoderScheduler:
    """An encoder's queue; called on one event loop."""

    def __init__(self, seeing: VisionEncoder, worker: BatchWorker, openers: Executor, limits: Limits) -> None:
        self.seeing = seeing
        self.counts = Counts()
        self._worker = worker
        self._openers = openers
        self._limits = limits
        self._cache = EmbeddingCache(limits.cache_bytes)
        self._flights: dict[Key, _InFlight] = {}
        self._opened: deque[tuple[Any, asyncio.Future[Tensor]]] = deque()
        self._pump: asyncio.Task[None] | None = None

    @property
    def evictions(self) -> int:
        """Embeddings given up for others."""
        return self._cache.evictions

    @property
    def in_flight(self) -> int:
        """Images on their way."""
        return len(self._flights)

    def at_hand(self, header: Header, tenant: str, images: int = 1) -> Tensor | None:
        """An image's embeddings, where they are kept."""
        held = self.cached(header.digest, tenant, alone=images == 1)
        return None if held is None else held.rows

    def cached(self, file_digest: str, tenant: str, *, alone: bool) -> Encoded | None:
        """What was made of an image, by its file's digest, where it is kept."""
        held = self._cache.get((tenant, file_digest, alone))
        self.counts.hits += held is not None
        return held

    async def encode(self, file: bytes, header: Header, tenant: str, images: int = 1) -> Encoded:
        """Return what is made of an image of a chat of ``images``, its embeddings in FP32.

        Raises:
            RefusalError: the file cannot be decoded, or the encoder failed.
        """
        key = _key(header, tenant, images)
        held = self.cached(header.digest, tenant, alone=images == 1)
        if held is not None:
            return held
        flight = self._flights.get(key)
        if flight is None:
            self.counts.misses += 1
            flight = self._flights[key] = _InFlight(asyncio.create_task(self._fly(key, file, header, images)))
        else:
            self.counts.hits += 1
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                self._flights.pop(key, None)
                flight.task.cancel()

    async def _fly(self, key: Key, file: bytes, header: Header, images: int) -> Encoded:
        count = self.seeing.rule.count(header.width_px, header.height_px, images=images)
        tokens = count.encoded
        self.counts.pending_tokens += tokens
        try:
            loop = asyncio.get_running_loop()
            pixels = await loop.run_in_executor(self._openers, self.seeing.pixels, file, images)
            done: asyncio.Future[Tensor] = loop.create_future()
            self._opened.append((pixels, done))
            if self._pump is None:
                self._pump = asyncio.create_task(self._encode_all())
            encoded = Encoded(await done, self.seeing.rows(count).columns)
            self._cache.put(key, encoded)
            return encoded
        finally:
            self.counts.pending_tokens -= tokens
            own = self._flights.get(key)
            if own is not None and own.task is asyncio.current_task():
                del self._flights[key]

    async def _encode_all(self) -> None:
        """Encode what is open, batch by batch, until nothing is."""
        try:
            while self._opened:
                batch = [self._opened.popleft() for _ in range(min(len(self._opened), self._limits.batch_images))]
                wanted = [(pixels, done) for pixels, done in batch if not done.cancelled()]
                if wanted:
                    await self._encode([pixels for pixels, _ in wanted], [done for _, done in wanted])
        finally:
            self._pump = None

    async def _encode(self, pixels: list[Any], waiting: Sequence["asyncio.Future[Tensor]"]) -> None:
        """Encode one batch; one that fails is tried image by image, so that a mistake is its image's own."""
        loop, seeing = asyncio.get_running_loop(), self.seeing
        began = loop.time()
        try:
            made = await self._worker.run(lambda: _computed(seeing, pixels))
        except Exception as error:  # noqa: BLE001  (whoever waits must learn of any failure)
            if len(waiting) == 1:
                if not waiting[0].done():
                    waiting[0].set_exception(error)
                return
            for one, done in zip(pixels, waiting, strict=True):
                await self._encode([one], [done])
            return
        self.counts.encode_seconds += loop.time() - began
        self.counts.encoded_images += len(made)
        for rows, done in zip(made, waiting, strict=True):
            if not done.done():
                done.set_result(rows)


def _key(header: Header, tenant: str, images: int) -> Key:
    return tenant, header.digest, images == 1


def done_by(encoding: EncoderScheduler) -> dict[str, float]:
    """What an encoder has done since it started."""
    counts = encoding.counts
    return {
        "encoded_images": counts.encoded_images,
        "encode_seconds": counts.encode_seconds,
        "cache_hits": counts.hits,
        "cache_misses": counts.misses,
        "cache_evictions": encoding.evictions,
    }


def _computed(seeing: VisionEncoder, pixels: Sequence[Any]) -> list[Tensor]:
    with torch.inference_mode():
        return [rows.float().contiguous() for rows in seeing.encode(pixels)]
