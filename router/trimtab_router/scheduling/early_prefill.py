"""Rows that can begin before all that they read is there: chats of which the first images are encoded.

They begin where a place would idle, behind everybody who has all he needs, and take no place from others as long as
they wait for the rest: their replica lets go on who can. Pure.
"""

from collections.abc import Mapping

from trimtab_router.scheduling.interfaces import StatsSink, StreamingTransport
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.replica_slots import Batch
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest


class EarlyPrefill:
    """The rows of one stage that do not have all they read.

    Args:
        writer: tells replicas of what comes.
        tally: counts those that begin.
    """

    def __init__(self, transport: StreamingTransport, stats: StatsSink) -> None:
        self._transport = transport
        self._stats = stats
        self._waiting: list[StageRequest] = []
        self._started: dict[StageRequest, Batch] = {}

    def add(self, request: StageRequest) -> None:
        """Know of a row that can begin."""
        self._waiting.append(request)

    @property
    def has_waiting(self) -> bool:
        """Whether a row has not begun that could."""
        self._waiting = [request for request in self._waiting if not request.closed]
        return bool(self._waiting)

    def next_queue(self) -> DeadlineQueue | None:
        """The most urgent row that has not begun, as a policy sees what waits; None where there is none.

        Whoever asks takes it out of this queue again.
        """
        if not self.has_waiting:
            return None
        queue = DeadlineQueue(1)
        queue.push(RowSlice(min(self._waiting, key=lambda request: request.due_at), 0, 1))
        return queue

    def remove(self, request: StageRequest) -> None:
        """A row begins, or is to wait for the rest; one that neither does any more is known no longer."""
        self._waiting = [other for other in self._waiting if other is not request]

    def on_dispatch(self, batch: Batch) -> None:
        """A row is in a replica's hands."""
        self._started[batch.row_slices[0].request] = batch
        self._stats.count_early_prefill()

    def on_batch_end(self, batch: Batch) -> None:
        """It is there no more."""
        self._started.pop(batch.row_slices[0].request, None)

    def add_images(self, request: StageRequest, images: Mapping[int, bytes]) -> Batch | None:
        """Tell of images that came, by their numbers; returns the row's parcel, None where it has not begun."""
        batch = self._started.get(request)
        if batch is not None and images:
            self._transport.send_images(batch, images)
        return batch
