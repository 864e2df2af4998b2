"""`EmbeddingShares`: additional copies of a batch's embeddings, for requests that joined it with identical images."""

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
    """Additional embeddings of one batch in flight, numbered after the batch's own rows.

    Args:
        replica: replica that encodes the batch.
        batch: the batch.
        name: name under which its embeddings are stored.
        tasks: holds the requests until they are answered, whatever happens to the batch.
    """

    def __init__(self, replica: ReplicaClient, batch: Batch, name: str, tasks: set[asyncio.Task[Any]]) -> None:
        self._replica = replica
        self._batch = batch
        self._name = name
        self._tasks = tasks
        self._pending: list[tuple[int, asyncio.Task[bool]]] = []

    def share(self, row: int) -> None:
        """Ask the replica to store a row of the batch once more."""
        url = self.url(self._batch.rows + len(self._pending))
        task = asyncio.get_running_loop().create_task(self._replica.share_embedding(url, embedding_id(self._name, row)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._pending.append((row, task))

    async def wait(self) -> None:
        """Wait until the replica has answered every request: until then the embeddings must not be fetched."""
        while pending := [task for _, task in self._pending if not task.done()]:
            await asyncio.wait(pending)

    def results(self, references: Array) -> Sequence[Mapping[str, Array] | None]:
        """Outputs for each additional row, None if the replica failed to store it.

        Args:
            references: [rows] of the batch, as the replica reported them.

        Raises:
            ProtocolError: the replica reported something else.
        """
        shared = [references[row : row + 1] if task.result() else None for row, task in self._pending]
        return [
            None
            if row_reference is None
            else {
                EMBEDDINGS_INPUT: image_fanout.addressed_references(
                    row_reference, [self.url(self._batch.rows + number)]
                )
            }
            for number, row_reference in enumerate(shared)
        ]

    def url(self, row: int) -> str:
        """URL of a row's embedding. Additional rows follow those of the batch."""
        return self._replica.embedding_url(self._batch.variant, embedding_id(self._name, row))
