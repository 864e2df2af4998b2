"""`EmbeddingStore`: embeddings stored by name until another replica fetches them; and `PendingImages`.

A name is fetched once; it is freed when fetched, dropped or expired.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar

from trimtab_model_servers.chat.embedding_client import ImageRefusal
from trimtab_model_servers.chat.interfaces import ImageEmbedding
from trimtab_model_servers.errors import RefusalError
from trimtab_protocol.chat.embedding_refs import ArrivedImage, EmbeddingRef

TTL_SECONDS: Final = 60.0
MAX_NAMES: Final = 4096
Value = TypeVar("Value")


class KeyedFutures(Generic[Value]):
    """Values by name that may be awaited before they exist, for at most ``ttl_seconds``; for one event loop.

    A dropped name is not created again: a request for it fails at once, because its requester has left meanwhile.
    """

    def __init__(self, ttl_seconds: float = TTL_SECONDS) -> None:
        self._ttl_seconds = ttl_seconds
        self._futures: dict[str, asyncio.Future[Value]] = {}
        self._dropped: OrderedDict[str, None] = OrderedDict()
        """The latest ``MAX_NAMES`` dropped names."""

    def __len__(self) -> int:
        return len(self._futures)

    def expect(self, name: str) -> "asyncio.Future[Value]":
        """The future of a name, created if missing; RefusalError 410 if it was dropped, 429 if too many exist."""
        future = self._futures.get(name)
        if future is None:
            if name in self._dropped:
                raise _dropped_error(name)
            if len(self._futures) >= MAX_NAMES:
                raise RefusalError(429, f"{MAX_NAMES} names are stored or awaited already")
            loop = asyncio.get_running_loop()
            future = self._futures[name] = loop.create_future()
            loop.call_later(self._ttl_seconds, self._expire, name, future)
        return future

    async def wait(self, name: str) -> Value:
        """Wait for a value, which stays stored; RefusalError. A cancelled wait removes a name that only it created."""
        existed, future = name in self._futures, self.expect(name)
        try:
            if future.done():
                return future.result()
            async with asyncio.timeout(self._ttl_seconds):
                return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not existed and not future.done():
                self._remove(name)
            raise
        except TimeoutError as error:
            raise RefusalError(504, f"nothing was stored as {name!r} within {self._ttl_seconds:g} s") from error

    def drop(self, name: str) -> bool:
        """Remove a name for good; False if it does not exist."""
        self._dropped[name] = None
        if len(self._dropped) > MAX_NAMES:
            self._dropped.popitem(last=False)
        return self._remove(name)

    def _remove(self, name: str) -> bool:
        future = self._futures.pop(name, None)
        if future is None:
            return False
        if not future.done():
            _fail(future, _dropped_error(name))
        elif future.exception() is None:
            self._on_remove(future.result())
        return True

    def _on_remove(self, value: Value) -> None:
        """Free what a removed value holds."""

    def _expire(self, name: str, future: "asyncio.Future[Value]") -> None:
        if self._futures.get(name) is future:
            self.drop(name)


class EmbeddingStore(KeyedFutures[ImageEmbedding]):
    """Embeddings by name, at most ``max_bytes``; embeddings stored under several names count once."""

    def __init__(self, max_bytes: int, ttl_seconds: float = TTL_SECONDS) -> None:
        super().__init__(ttl_seconds)
        self._max_bytes = max_bytes
        self._name_counts: Counter[ImageEmbedding] = Counter()
        self.bytes = 0

    def put(self, name: str, embedding: ImageEmbedding) -> None:
        """Store under an expected name; ignored if it was dropped meanwhile; RefusalError 429 if the store is full."""
        future = self._futures.get(name)
        if future is None or future.done():
            return
        if embedding not in self._name_counts and self.bytes + embedding.rows.nbytes > self._max_bytes:
            refusal = RefusalError(429, f"{self.bytes:,} bytes of embeddings are stored already; fetch them first")
            _fail(future, refusal)
            raise refusal
        self._store(future, embedding)

    def add_names(self, name: str, others: Sequence[str]) -> None:
        """Store the embeddings of a name, now or once they are there, under others; RefusalError 429 if too many."""
        source = self.expect(name)
        for other in others:
            source.add_done_callback(partial(self._copy, other, self.expect(other)))

    def fail(self, name: str, refusal: RefusalError) -> None:
        if not (future := self.expect(name)).done():
            _fail(future, refusal)

    async def take(self, names: Sequence[str]) -> list[ImageEmbedding]:
        """Wait for names and remove them; RefusalError if one failed or is late; the others then stay stored."""
        embeddings = [await self.wait(name) for name in names]
        for name in names:
            self.drop(name)
        return embeddings

    def _copy(
        self, other: str, target: "asyncio.Future[ImageEmbedding]", source: "asyncio.Future[ImageEmbedding]"
    ) -> None:
        if source.exception() is not None:
            self.drop(other)
        elif not target.done():
            self._store(target, source.result())

    def _store(self, future: "asyncio.Future[ImageEmbedding]", embedding: ImageEmbedding) -> None:
        self.bytes += 0 if embedding in self._name_counts else embedding.rows.nbytes
        self._name_counts[embedding] += 1
        future.set_result(embedding)

    def _on_remove(self, value: ImageEmbedding) -> None:
        self._name_counts[value] -= 1
        if not self._name_counts[value]:
            del self._name_counts[value]
            self.bytes -= value.rows.nbytes


class PendingImages(KeyedFutures[ArrivedImage]):
    """Images of chats that were sent before all of their images were encoded, by request id and number in the chat."""

    def resolve(self, request_id: str, images: Sequence[ArrivedImage]) -> None:
        """Record where images can be fetched from, before or after their chat; RefusalError 429 if too many."""
        for image in images:
            name = f"{request_id}/{image.image}"
            if name not in self._dropped and not (future := self.expect(name)).done():  # else the chat has ended
                future.set_result(image)

    async def wait_for_url(self, request_id: str, image: int, announced: EmbeddingRef) -> str:
        """Wait for an image; return its URL; ImageRefusal if it is late or differs from the announced one."""
        name = f"{request_id}/{image}"
        try:
            arrived = await self.wait(name)
        except RefusalError as refusal:
            raise ImageRefusal(image, str(refusal)) from refusal
        finally:
            self.drop(name)
        if _describe(arrived) != _describe(announced):
            raise ImageRefusal(image, f"it has {_describe(arrived)}; announced were {_describe(announced)}")
        return arrived.url


def _describe(image: EmbeddingRef) -> str:
    """The properties that determine a prompt and its cached prefix."""
    tiles = f" in {image.columns} columns of tiles" if image.columns else ""
    return f"{image.rows} rows{tiles}, {image.digest!r}"


def _dropped_error(name: str) -> RefusalError:
    return RefusalError(410, f"{name!r} was dropped, or fetched already")


def _fail(future: "asyncio.Future[Any]", refusal: RefusalError) -> None:
    future.set_exception(refusal)
    future.exception()  # retrieved, in case nothing awaits it
