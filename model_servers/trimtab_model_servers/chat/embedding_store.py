"""`EmbeddingStore`: embeddings stored by name until another replica fetches them.

A name is fetched once; it is freed when fetched, dropped or expired.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeVar

from torch import Tensor

from trimtab_model_servers.chat.embedding_client import ImageRefusal
from trimtab_model_servers.errors import RefusalError
from trimtab_protocol.chat.embedding_refs import ArrivedImage, EmbeddingRef

TTL_SECONDS: Final = 60.0
MAX_NAMES: Final = 4096
Value = TypeVar("Value")


class KeyedFutures(Generic[Value]):
    """Futures by name.

    A dropped name is not created again: a request for it fails at once, because its requester has left meanwhile.

    Args:
        ttl_seconds: how long a name exists or is awaited.
        on_drop: called with each value that is dropped.
    """

    def __init__(self, ttl_seconds: float = TTL_SECONDS, on_drop: Callable[[Value], None] = lambda _: None) -> None:
        self._ttl_seconds = ttl_seconds
        self._on_drop = on_drop
        self._futures: dict[str, asyncio.Future[Value]] = {}
        self._dropped: OrderedDict[str, None] = OrderedDict()
        """The latest ``MAX_NAMES`` dropped names."""

    def __len__(self) -> int:
        return len(self._futures)

    def get(self, name: str) -> "asyncio.Future[Value] | None":
        return self._futures.get(name)

    def was_dropped(self, name: str) -> bool:
        return name in self._dropped

    def get_or_create(self, name: str) -> "asyncio.Future[Value]":
        """The future of a name.

        Raises:
            RefusalError: 410, it was dropped; 429, too many names exist.
        """
        future = self._futures.get(name)
        if future is None:
            if self.was_dropped(name):
                raise _dropped_error(name)
            if len(self._futures) >= MAX_NAMES:
                raise RefusalError(429, f"{MAX_NAMES} names are stored or awaited already")
            loop = asyncio.get_running_loop()
            future = self._futures[name] = loop.create_future()
            loop.call_later(self._ttl_seconds, self._expire, name, future)
        return future

    async def wait(self, name: str) -> Value:
        """Wait for a value, which stays stored. A cancelled wait removes a name that only it created.

        Raises:
            RefusalError: the value failed, was dropped, or did not arrive in time.
        """
        existed, future = name in self._futures, self.get_or_create(name)
        try:
            if future.done():
                return future.result()
            return await asyncio.wait_for(asyncio.shield(future), self._ttl_seconds)
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
        if future.done() and not future.cancelled() and future.exception() is None:
            self._on_drop(future.result())
        elif not future.done():
            future.set_exception(_dropped_error(name))
            future.exception()  # retrieved, in case nothing awaits it
        return True

    def _expire(self, name: str, future: "asyncio.Future[Value]") -> None:
        if self._futures.get(name) is future:
            self.drop(name)


def _dropped_error(name: str) -> RefusalError:
    return RefusalError(410, f"{name!r} was dropped, or fetched already")


@dataclass(frozen=True, slots=True, eq=False)
class StoredEmbedding:
    """An image's embeddings."""

    rows: Tensor
    digest: str
    """Identity of image and encoder."""
    columns: int = 0
    """Columns of the image's tile grid; 0 if the model does not mark tiles."""


class EmbeddingStore:
    """Embeddings by name, which may be requested before they are stored; for one event loop.

    Args:
        max_bytes: bound of what is stored; embeddings stored under several names count once.
        ttl_seconds: how long a name is stored, or awaited.
    """

    def __init__(self, max_bytes: int, ttl_seconds: float = TTL_SECONDS) -> None:
        self._max_bytes = max_bytes
        self._names: KeyedFutures[StoredEmbedding] = KeyedFutures(ttl_seconds, self._on_drop)
        self._name_counts: Counter[StoredEmbedding] = Counter()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._names)

    def expect(self, name: str) -> None:
        """Announce a name that will be stored or fail."""
        self._names.get_or_create(name)

    def put(self, name: str, embedding: StoredEmbedding) -> None:
        """Store embeddings under an announced name; ignored if the name was dropped meanwhile.

        Raises:
            RefusalError: 429, the store is full.
        """
        future = self._names.get(name)
        if future is None or future.done():
            return
        if embedding not in self._name_counts and self.bytes + embedding.rows.nbytes > self._max_bytes:
            refusal = RefusalError(429, f"{self.bytes:,} bytes of embeddings are stored already; fetch them first")
            self.fail(name, refusal)
            raise refusal
        self._store(future, embedding)

    def add_names(self, name: str, others: Sequence[str]) -> None:
        """Store the embeddings of a name, now or once they are there, under other names too.

        Raises:
            RefusalError: 429, too many names.
        """
        source = self._names.get_or_create(name)
        for other in others:
            source.add_done_callback(partial(self._copy, other, self._names.get_or_create(other)))

    def fail(self, name: str, refusal: RefusalError) -> None:
        """Fail the requests for a name."""
        future = self._names.get_or_create(name)
        if not future.done():
            future.set_exception(refusal)
            future.exception()  # retrieved, in case nothing awaits it

    async def take(self, names: Sequence[str]) -> list[StoredEmbedding]:
        """Wait for names, remove them, and return their embeddings.

        Raises:
            RefusalError: a name failed, or was not stored in time; the others stay stored.
        """
        embeddings = [await self._names.wait(name) for name in names]
        for name in names:
            self.drop(name)
        return embeddings

    def drop(self, name: str) -> bool:
        """Remove a name; False if it does not exist."""
        return self._names.drop(name)

    def _copy(
        self, other: str, target: "asyncio.Future[StoredEmbedding]", source: "asyncio.Future[StoredEmbedding]"
    ) -> None:
        if source.exception() is not None:
            self.drop(other)
        elif not target.done():
            self._store(target, source.result())

    def _store(self, future: "asyncio.Future[StoredEmbedding]", embedding: StoredEmbedding) -> None:
        self.bytes += 0 if embedding in self._name_counts else embedding.rows.nbytes
        self._name_counts[embedding] += 1
        future.set_result(embedding)

    def _on_drop(self, embedding: StoredEmbedding) -> None:
        self._name_counts[embedding] -= 1
        if not self._name_counts[embedding]:
            del self._name_counts[embedding]
            self.bytes -= embedding.rows.nbytes


class PendingImages:
    """Images by request id and their number in the chat; for one event loop.

    Args:
        ttl_seconds: how long an image is awaited, or its arrival stored.
    """

    def __init__(self, ttl_seconds: float = TTL_SECONDS) -> None:
        self._arrivals: KeyedFutures[ArrivedImage] = KeyedFutures(ttl_seconds)

    def __len__(self) -> int:
        return len(self._arrivals)

    def resolve(self, request_id: str, images: Sequence[ArrivedImage]) -> None:
        """Record where images can be fetched from, before or after their chat arrives.

        Raises:
            RefusalError: 429, too many images are awaited.
        """
        for image in images:
            name = _name(request_id, image.image)
            if not self._arrivals.was_dropped(name):  # else the chat that awaited it has ended
                future = self._arrivals.get_or_create(name)
                if not future.done():
                    future.set_result(image)

    async def wait(self, request_id: str, image: int, announced: EmbeddingRef) -> str:
        """Wait for an image; return the URL of its embeddings.

        Raises:
            ImageRefusal: it did not arrive in time, or differs from the announced one.
        """
        name = _name(request_id, image)
        try:
            arrived = await self._arrivals.wait(name)
        except RefusalError as refusal:
            raise ImageRefusal(image, str(refusal)) from refusal
        finally:
            self._arrivals.drop(name)
        if _describe(arrived) != _describe(announced):
            raise ImageRefusal(image, f"it has {_describe(arrived)}; announced were {_describe(announced)}")
        return arrived.url


def _describe(image: EmbeddingRef) -> str:
    """The properties that determine a prompt and its cached prefix."""
    tiles = f" in {image.columns} columns of tiles" if image.columns else ""
    return f"{image.rows} rows{tiles}, {image.digest!r}"


def _name(request_id: str, image: int) -> str:
    return f"{request_id}/{image}"
