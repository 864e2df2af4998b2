"""`EmbeddingStore`: embeddings stored by name until another replica fetches them.

A name is fetched once; it is freed when fetched, dropped or expired.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from trimtab_model_servers.chat.keyed_futures import TTL_SECONDS, KeyedFutures
from trimtab_model_servers.errors import RefusalError


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
