"""`EarlyPrefill`: chats whose prefill starts before all of their images are encoded.

A partial chat starts only on idle capacity and only after every complete chat. While it waits for its remaining images,
it occupies no capacity: its replica serves other chats.
"""

from collections.abc import Mapping
from dataclasses import replace

from trimtab_router.scheduling.batch_outcomes import BatchOutcome
from trimtab_router.scheduling.features import Dispatcher, Feature
from trimtab_router.scheduling.interfaces import StatsSink, StreamingTransport
from trimtab_router.scheduling.policies.interface import Dispatch
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.replica_slots import Batch, ReplicaSlots
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest


class EarlyPrefill(Feature):
    """Partial chats of one stage."""

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
        self._waiting = [request for request in self._waiting if not request.closed]
        return bool(self._waiting)

    def remove(self, request: StageRequest) -> None:
        self._waiting = [other for other in self._waiting if other is not request]

    def add_images(self, request: StageRequest, images: Mapping[int, bytes]) -> Batch | None:
        """Send images, by their indices in the chat; return the batch of the chat, or None if it has not started."""
        batch = self._started.get(request)
        if batch is not None and images:
            self._transport.send_images(batch, images)
        return batch

    def on_dispatch(self, batch: Batch) -> None:
        if batch.early_prefill:
            self._started[batch.row_slices[0].request] = batch
            self._stats.count_early_prefill()

    def on_batch_end(self, batch: Batch, outcome: BatchOutcome, now: float) -> None:  # noqa: ARG002 - a hook
        self._started.pop(batch.row_slices[0].request, None)

    def on_idle(self, dispatcher: Dispatcher, now: float) -> None:
        while self.has_waiting:
            selected = dispatcher.replica_selection.early_prefill_replica(dispatcher.replicas, dispatcher.variant)
            if selected is None:
                return
            self._start(min(self._waiting, key=lambda request: request.due_at), dispatcher, *selected, now)

    def _start(
        self, request: StageRequest, dispatcher: Dispatcher, replica: ReplicaSlots, variant: str, now: float
    ) -> None:
        queue = DeadlineQueue(1)
        queue.push(RowSlice(request, 0, 1))
        decision = dispatcher.policy.decide(replace(dispatcher.view(variant, now, replica), waiting=queue))
        self.remove(queue.pop().request)
        if isinstance(decision, Dispatch):
            dispatcher.dispatch(replica, variant, decision, now, early=True)
