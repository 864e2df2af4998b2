"""Schedulers by the role of a stage: predict, encode or generate. The role is decided once, in `scheduler_class`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

from trimtab_pipelines.stages import Stage
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk
from trimtab_protocol.tensors import Array
from trimtab_router.scheduling.first_token_times import FirstTokenTimes
from trimtab_router.scheduling.interfaces import Dispatcher, Feature, StatsSink, Transport
from trimtab_router.scheduling.policies.interface import Dispatch, SchedulerView
from trimtab_router.scheduling.prefix_routing import PrefixRouting
from trimtab_router.scheduling.prompt_lengths import PromptFeatures, PromptLengths
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.queue_admission import StageStatus
from trimtab_router.scheduling.replica_slots import Batch, BatchOutcome, Completed, ReplicaSlots
from trimtab_router.scheduling.single_flight import SingleFlight
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest
from trimtab_router.scheduling.stage_scheduler import StageScheduler, StageSnapshot


class EarlyPrefill(Feature):
    """Partial chats of one stage. They start on idle capacity, and occupy none while they wait for images."""

    def __init__(self, transport: Transport, stats: StatsSink) -> None:
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
            dispatcher.dispatch(replica, decision, now, early=True)


def scheduler_class(stage: Stage) -> type[StageScheduler]:
    if stage.generates:
        return GenerationScheduler
    return EncodeScheduler if stage.encodes else StageScheduler


class EncodeScheduler(StageScheduler):
    """Scheduler of an encoder stage, whose replicas store embeddings, with single-flight of identical images."""

    def set_up_role(self) -> None:
        self._single_flight = SingleFlight(
            self._transport, self.queue, self.completion, clock=self._clock, stats=self._stats, wake=self.wake
        )
        self.features.append(self._single_flight)

    def snapshot(self) -> StageSnapshot:
        encodings, joined_rows = len(self._single_flight), self._single_flight.joined_rows
        return replace(super().snapshot(), encodings_in_flight=encodings, joined_rows=joined_rows)

    def release_embeddings(self, references: Array) -> None:
        self._transport.release(references)

    def view(self, variant: str, now: float, replica: ReplicaSlots | None = None) -> SchedulerView:
        """Return a view. Images are divided between the free encoders, so that the first does not take all."""
        view, free = super().view(variant, now, replica), sum(replica.free for replica in self.replicas)
        return replace(view, max_batch_rows=min(view.max_batch_rows, -(-self.queue.rows // free))) if free else view

    def rows_to_send(self, row_slices: Sequence[RowSlice]) -> list[RowSlice]:
        return self._single_flight.unique_rows(super().rows_to_send(row_slices))


class GenerationScheduler(StageScheduler):
    """Scheduler of a generation stage, whose replicas stream rows concurrently, with early prefill.

    Latency, for the SLO and for predictions, is time to first token. A row occupies capacity of its replica until its
    last token; queued rows wait for that.
    """

    concurrent_rows = True

    def set_up_role(self) -> None:
        self.prompt_lengths = PromptLengths()
        self._early_prefill = EarlyPrefill(self._transport, self._stats)
        self._prefix_routing = PrefixRouting()
        self.choose_replica = self._prefix_replica
        self._first_token_times = FirstTokenTimes()
        # The last one sees what the others change in what a replica has to prefill.
        self.features += [self._early_prefill, self._prefix_routing, self._first_token_times]
        self._batches: dict[StageRequest, set[Batch]] = {}
        self._with_first_token: set[Batch] = set()
        self._images_complete_at: dict[Batch, float] = {}

    def snapshot(self) -> StageSnapshot:
        waiting, started = self._early_prefill.waiting_count, self._early_prefill.started_count
        return replace(super().snapshot(), waiting_partial_chats=waiting, started_partial_chats=started)

    def refresh_replicas(self) -> None:
        for replica in self.replicas:
            replica.set_capacity(self.plan.batch_size)
        super().refresh_replicas()
        self.prompt_lengths.point = self.latency_model.key(self.variant)
        limits = [replica.max_prompt_tokens.get(self.variant, inf) for replica in self.replicas]
        self.latency_model.max_prompt_tokens = max(limits, default=inf)

    def _prefix_replica(self, candidates: Iterable[ReplicaSlots], variant: str) -> ReplicaSlots | None:
        candidates = list(candidates)
        least_loaded, head = self.replica_selection.free_replica(candidates, variant), self.queue.head()
        if least_loaded is None or head is None:
            return least_loaded
        return self._prefix_routing.preferred(candidates, least_loaded, head.request)

    def status(self) -> StageStatus:
        return super().status()._replace(concurrent_prefills=self.concurrent_prefills())

    def concurrent_prefills(self) -> int:
        return min((replica.concurrent_prefills for replica in self.replicas if replica.ready_variants), default=0)

    def estimate_prompts(self, request: StageRequest, images: int) -> None:
        request.prompt_features = [
            PromptFeatures.from_inputs(request.inputs, row, images) for row in range(request.rows)
        ]
        tokens = [self.prompt_lengths.tokens(features) for features in request.prompt_features]
        if any(tokens):
            request.prompt_tokens = tokens
            request.set_prefill_seconds(self.latency_model.prefill_seconds(max(tokens)))

    @property
    def supports_partial_prefill(self) -> bool:
        return any(replica.partial_prefill for replica in self.replicas)

    def start_early_prefill(self, request: StageRequest) -> None:
        self._early_prefill.add(request)
        self.wake()

    def add_images(self, request: StageRequest, images: Mapping[int, bytes]) -> None:
        self._early_prefill.add_images(request, images)

    def complete_images(self, request: StageRequest, images: Mapping[int, bytes]) -> bool:
        """Send the last images of a chat; False if it has not started, and must be enqueued."""
        batch = self._early_prefill.add_images(request, images)
        if batch is None:
            self._early_prefill.remove(request)
            return False
        batch.replica.resume(batch)
        self._images_complete_at[batch] = self._clock.now
        return True

    def cancel(self, request: StageRequest) -> None:
        super().cancel(request)
        for batch in list(self._batches.get(request, ())):
            self._transport.cancel(batch)

    def send(self, batch: Batch) -> None:
        self._batches.setdefault(batch.row_slices[0].request, set()).add(batch)
        self._transport.stream(batch, self._on_chunk, self.on_batch_end)

    def observe(self, batch: Batch, outcome: BatchOutcome, now: float) -> None:
        """Learn how long a row occupied capacity; a partial chat counts from when all of its images have arrived."""
        self._with_first_token.discard(batch)
        since = self._images_complete_at.pop(batch, batch.dispatched_at)
        request = batch.row_slices[0].request
        batches = self._batches[request]
        batches.discard(batch)
        if not batches:
            del self._batches[request]
        if isinstance(outcome, Completed):
            self.latency_model.observe_residence(now - since)

    def _on_chunk(self, batch: Batch, chunk: Chunk | LastChunk) -> None:
        now, row = self._clock.now, batch.row_slices[0]
        if batch not in self._with_first_token:
            self._with_first_token.add(batch)
            batch.replica.on_first_token(batch)
            if not batch.early_prefill:
                seconds = now - batch.dispatched_at
                self.outliers.on_first_token(batch, seconds, self._first_token_times.observe(batch, seconds))
            self._stats.observe_batch(batch.key, batch.rows, *self._observe_first_token(batch, now))
        if isinstance(chunk, LastChunk) and row.request.prompt_features:
            self.prompt_lengths.learn(row.request.prompt_features[row.start], chunk.usage, batch.key)
        if not row.request.closed:
            row.request.variant = batch.variant
            row.request.owner.on_chunk(row.request, row.start, chunk, now)

    def _observe_first_token(self, batch: Batch, now: float) -> tuple[float, float]:
        """Return the time to first token and the ratio to the profile; an early prefill is not learned from."""
        if batch.early_prefill:
            since = self._images_complete_at.get(batch, batch.dispatched_at)
            return now - since, self.latency_model.service_times.ratio(batch.key)
        return self.latency_model.observe(batch, Completed((), batch.point.name), now)
