"""Embeddings that wait under a name for who pulls them: given once, or freed when asked, cancelled or too old."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from trimtab_model_servers.chat.keyed_futures import KEEP_SECONDS, KeyedFutures
from trimtab_model_servers.errors import RefusalError


@dataclass(frozen=True, slots=True, eq=False)
class StoredEmbedding:
    """An image's embeddings, what it shows, and into how many columns of tiles it is cut; 0 where none is told."""

    rows: Tensor
    digest: str
    columns: int = 0


class EmbeddingStore:
    """What is kept by name; a name may be asked for before it is there. Used on one event loop.

    Args:
        most_bytes: more is not kept at once; what lies under several names counts once.
        seconds: how long a name is kept, or waited for.
    """

    def __init__(self, most_bytes: int, seconds: float = KEEP_SECONDS) -> None:
        self._most_bytes = most_bytes
        self._names: KeyedFutures[StoredEmbedding] = KeyedFutures(seconds, self._freed)
        self._names_of: Counter[StoredEmbedding] = Counter()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._names)

    def expect(self, name: str) -> None:
        """Promise that a name will be there, or refused."""
        self._names.of(name)

    def put(self, name: str, held: StoredEmbedding) -> None:
        """Keep embeddings under a name that is expected; nobody waits for one that was dropped meanwhile.

        Raises:
            RefusalError: 429, too much is kept.
        """
        found = self._names.known(name)
        if found is None or found.done():
            return
        if held not in self._names_of and self.bytes + held.rows.nbytes > self._most_bytes:
            refusal = RefusalError(429, f"{self.bytes:,} bytes of embeddings wait to be pulled already; pull them")
            self.refuse(name, refusal)
            raise refusal
        self._hold(found, held)

    def share(self, name: str, others: Sequence[str]) -> None:
        """Keep under other names, too, what is kept under one, or will be; each is given once.

        Raises:
            RefusalError: 429, too many names are known.
        """
        first = self._names.of(name)
        for other in others:
            first.add_done_callback(partial(self._passed_on, other, self._names.of(other)))

    def refuse(self, name: str, refusal: RefusalError) -> None:
        """Tell who waits for a name that it will not come."""
        found = self._names.of(name)
        if not found.done():
            found.set_exception(refusal)
            found.exception()  # seen, even if nobody asks

    async def give(self, names: Sequence[str]) -> list[StoredEmbedding]:
        """Wait for names, give what is under them, and keep it no longer.

        Raises:
            RefusalError: one was refused, or was not there in time; the others are kept on.
        """
        held = [await self._names.wait(name) for name in names]
        for name in names:
            self.drop(name)
        return held

    def drop(self, name: str) -> bool:
        """Keep a name no longer; False where there is none."""
        return self._names.drop(name)

    def _passed_on(
        self, other: str, also: "asyncio.Future[StoredEmbedding]", first: "asyncio.Future[StoredEmbedding]"
    ) -> None:
        if first.exception() is not None:
            self.drop(other)
        elif not also.done():
            self._hold(also, first.result())

    def _hold(self, under: "asyncio.Future[StoredEmbedding]", held: StoredEmbedding) -> None:
        self.bytes += 0 if held in self._names_of else held.rows.nbytes
        self._names_of[held] += 1
        under.set_result(held)

    def _freed(self, held: StoredEmbedding) -> None:
        self._names_of[held] -= 1
        if not self._names_of[held]:
            del self._names_of[held]
            self.bytes -= held.rows.nbytes
