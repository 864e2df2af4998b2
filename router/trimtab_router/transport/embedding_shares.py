"""`EmbeddingShares`: additional copies of a batch's embeddings, for requests that joined it with identical images."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab_pipelines.stages import EMBEDDINGS_INPUT
from trimtab_protocol.chat.internal_wire import embedding_id
from trimtab_protocol.tensors import Array
from trimtab_router.execution import chat_images
from trimtab_router.scheduling.replica_slots import Batch
from trimtab_router.transport.replica_client import ReplicaClient


class EmbeddingShares:
    """Additional embeddings of one batch in flight, stored under its name and numbered after its own rows.

    `tasks` holds the requests until they are answered, whatever happens to the batch.
    """

    def __init__(self, replica: ReplicaClient, batch: Batch, name: str, tasks: set[asyncio.Task[Any]]) -> None:
        self._replica = replica
        self._batch = batch
        self._name = name
        self._tasks = tasks
        self._pending: list[tuple[int, asyncio.Task[bool]]] = []

    def share(self, row: int) -> None:
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
        """Outputs for each additional row, None if the replica did not store it. Raises ProtocolError."""
        shared = [references[row : row + 1] if task.result() else None for row, task in self._pending]
        return [
            None
            if row_reference is None
            else {
                EMBEDDINGS_INPUT: chat_images.addressed_references(row_reference, [self.url(self._batch.rows + number)])
            }
            for number, row_reference in enumerate(shared)
        ]

    def url(self, row: int) -> str:
        return self._replica.embedding_url(self._batch.variant, embedding_id(self._name, row))
