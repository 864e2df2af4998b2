"""`EarlyPrefill`: chats whose prefill starts before all of their images are encoded.

A partial chat starts only on idle capacity and only after every complete chat. While it waits for its remaining images,
it occupies no capacity: its replica serves other chats.
"""

from collections.abc import Mapping

from trimtab_router.scheduling.interfaces import StatsSink, StreamingTransport
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.replica_slots import Batch
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest


class EarlyPrefill:
    """Partial chats of one stage.

    Args:
        transport: sends images to replicas.
        stats: counts early prefills.
    """

    def __init__(self, transport: StreamingTransport, stats: StatsSink) -> None:
        self._transport = transport
        self._stats = stats
        self._waiting: list[StageRequest] = []
        self._started: dict[StageRequest, Batch] = {}

    def add(self, request: StageRequest) -> None:
        self._waiting.append(request)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    @property
    def started_count(self) -> int:
        return len(self._started)

    @property
    def has_waiting(self) -> bool:
        """Whether a partial chat has not started."""
        self._waiting = [request for request in self._waiting if not request.closed]
        return bool(self._waiting)

    def next_queue(self) -> DeadlineQueue | None:
        """Return a queue with the most urgent partial chat that has not started; None if there is none."""
        if not self.has_waiting:
            return None
        queue = DeadlineQueue(1)
        queue.push(RowSlice(min(self._waiting, key=lambda request: request.due_at), 0, 1))
        return queue

    def remove(self, request: StageRequest) -> None:
        self._waiting = [other for other in self._waiting if other is not request]

    def on_dispatch(self, batch: Batch) -> None:
        self._started[batch.row_slices[0].request] = batch
        self._stats.count_early_prefill()

    def on_batch_end(self, batch: Batch) -> None:
        self._started.pop(batch.row_slices[0].request, None)

    def add_images(self, request: StageRequest, images: Mapping[int, bytes]) -> Batch | None:
        """Send images, by their indices in the chat; return the batch of the chat, or None if it has not started."""
        batch = self._started.get(request)
        if batch is not None and images:
            self._transport.send_images(batch, images)
        return batch
