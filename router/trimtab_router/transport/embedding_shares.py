"""Shell: what a batch of images is kept as, and for whom else some of them are kept once more."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab_pipelines.stages import EMBEDDINGS_INPUT
from trimtab_protocol.chat.internal_wire import embedding_id
from trimtab_protocol.tensors import Array
from trimtab_router.request import image_fanout
from trimtab_router.scheduling.replica_slots import Batch
from trimtab_router.transport.replica_client import ReplicaClient


class EmbeddingShares:
    """The rows of one batch under way that are kept once more, each under the next number behind the batch's own.

    Args:
        replica: that encodes the batch.
        parcel: the batch.
        name: it is kept as.
        under_way: holds what is asked until it is answered, whatever becomes of the batch.
    """

    def __init__(self, replica: ReplicaClient, parcel: Batch, name: str, under_way: set[asyncio.Task[Any]]) -> None:
        self._replica = replica
        self._parcel = parcel
        self._name = name
        self._under_way = under_way
        self._asked: list[tuple[int, asyncio.Task[bool]]] = []

    def share(self, row: int) -> None:
        """Have a row of it kept once more."""
        url = self.url(self._parcel.rows + len(self._asked))
        task = asyncio.get_running_loop().create_task(self._replica.share(url, embedding_id(self._name, row)))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        self._asked.append((row, task))

    async def asked(self) -> None:
        """Wait until the replica has answered each of them: before that, what they are to share must not be pulled."""
        while pending := [task for _, task in self._asked if not task.done()]:
            await asyncio.wait(pending)

    def of(self, references: Array) -> Sequence[Mapping[str, Array] | None]:
        """What became of each; None where the replica did not do it.

        Args:
            references: [rows] of the batch, as the replica tells them.

        Raises:
            ProtocolError: it told something else.
        """
        told = [references[row : row + 1] if task.result() else None for row, task in self._asked]
        return [
            None
            if one is None
            else {EMBEDDINGS_INPUT: image_fanout.addressed_references(one, [self.url(self._parcel.rows + number)])}
            for number, one in enumerate(told)
        ]

    def url(self, row: int) -> str:
        """Where a row of the batch is pulled from, or one that is kept once more."""
        return self._replica.kept_at(self._parcel.variant, embedding_id(self._name, row))
