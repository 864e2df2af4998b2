"""Stage scheduler: queues the rows of one stage, dispatches batches to replicas, and completes requests.

Late binding: a batch is formed when a replica is free for it and never waits for a busy one, except for a full batch
that is prefetched. The scheduler uses neither an event loop nor a network: clock, transport and statistics are
injected. The router and the simulator share it, so that both decide alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, cast

from trimtab_pipelines.plan import StagePlan
from trimtab_pipelines.stages import Stage
from trimtab_protocol.tensors import Array
from trimtab_router.refusal import Refusal
from trimtab_router.scheduling import replica_selection
from trimtab_router.scheduling.accuracy_monitor import AccuracyMonitor
from trimtab_router.scheduling.arrival_rate import ArrivalRate
from trimtab_router.scheduling.batch_completion import BatchCompletion
from trimtab_router.scheduling.batch_outcomes import BatchOutcome, Completed
from trimtab_router.scheduling.early_prefill import EarlyPrefill
from trimtab_router.scheduling.expiry import Expiry
from trimtab_router.scheduling.generation import GenerationTracker
from trimtab_router.scheduling.interfaces import Clock, EmbeddingTransport, StatsSink, StreamingTransport, Transport
from trimtab_router.scheduling.latency_model import LatencyModel, StageCapacity
from trimtab_router.scheduling.policies import earliest_deadline_first
from trimtab_router.scheduling.policies.interface import NEVER, Dispatch, DropPolicy, Policy, SchedulerView, WaitUntil
from trimtab_router.scheduling.query_of_death import QueryOfDeathDetector
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.queue_admission import QueueAdmission, StageStatus
from trimtab_router.scheduling.replica_slots import Batch, ReplicaSlots
from trimtab_router.scheduling.shadow_evaluation import ShadowEvaluation
from trimtab_router.scheduling.single_flight import SingleFlight, unique_rows
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest
from trimtab_router.scheduling.variant_selection import VariantSelection


@dataclass(frozen=True, slots=True)
class StageSnapshot:
    """What a scheduler holds at one moment, for diagnostics."""

    queue_rows: int
    inflight_batches: int
    waiting_partial_chats: int
    started_partial_chats: int
    """Chats in early prefill, until their last token."""
    encodings_in_flight: int
    joined_rows: int
    """Rows that share an encoding in flight."""


class QueueSettings(NamedTuple):
    """Bounds of a stage's queue."""

    max_rows: int
    drop_policy: DropPolicy
    grace_seconds: float
    """Time that rows stay queued while no replica is ready."""


class StageScheduler:
    """Scheduler of one stage.

    Args:
        stage: the stage.
        plan: the first plan.
        settings: bounds of its queue.
        policy: decides about each batch.
        clock: the clock.
        transport: sends batches; a `StreamingTransport` for a generation stage, an `EmbeddingTransport` for an encoder.
        stats: receives statistics.
        query_of_death: remembers rows that cost replicas; None if rows cannot be distinguished.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        plan: StagePlan,
        settings: QueueSettings,
        policy: Policy,
        clock: Clock,
        transport: Transport | StreamingTransport,
        stats: StatsSink,
        query_of_death: QueryOfDeathDetector | None,
    ) -> None:
        self.stage = stage
        self.plan = plan
        self.queue = DeadlineQueue(settings.max_rows)
        self.latency_model = LatencyModel(stage, plan, uses_fallbacks=policy.uses_fallbacks)
        self.replicas: list[ReplicaSlots] = []
        self.ready_replicas = 0
        self.had_replica = False
        """Whether a replica was ever ready."""
        self.variant_selection = VariantSelection(stage, plan.variant)
        self.accuracy_monitor = AccuracyMonitor(stage)
        self._shadow_evaluation = ShadowEvaluation(stage, self.accuracy_monitor)
        self._completion = BatchCompletion(stage, self.queue, stats, query_of_death)
        self.generation = (
            GenerationTracker(self.latency_model, clock, cast("StreamingTransport", transport), stats)
            if stage.generates
            else None
        )
        self._admission = QueueAdmission(
            stage, self.queue, self.latency_model, self.generation, settings.drop_policy, query_of_death
        )
        self._single_flight = (
            SingleFlight(cast("EmbeddingTransport", transport), self._on_cached_embedding, stats)
            if stage.encodes
            else None
        )
        self._early_prefill = EarlyPrefill(cast("StreamingTransport", transport), stats)
        self._expiry = Expiry(
            self.queue,
            self.latency_model,
            clock,
            drop_reason=self._drop_reason,
            dispatch=self._dispatch_ready,
            grace_seconds=settings.grace_seconds,
        )
        self._policy = replace(policy, decide=partial(_decide_or_fall_back, policy, stats))
        self._drop_policy = settings.drop_policy
        self._clock = clock
        self._transport = transport
        self._stats = stats
        self._dispatched_batches = 0
        self._arrivals = 0
        self._arrival_rate = ArrivalRate(clock.now)
        self._wake_pending = False

    @property
    def variant(self) -> str:
        """The variant that the stage runs now."""
        return self.latency_model.variant

    def snapshot(self) -> StageSnapshot:
        single_flight = self._single_flight
        return StageSnapshot(
            queue_rows=self.queue.rows,
            inflight_batches=sum(replica.inflight for replica in self.replicas),
            waiting_partial_chats=self._early_prefill.waiting_count,
            started_partial_chats=self._early_prefill.started_count,
            encodings_in_flight=0 if single_flight is None else len(single_flight),
            joined_rows=0 if single_flight is None else single_flight.joined_rows,
        )

    def set_downstream(self, schedulers: Sequence["StageScheduler"]) -> None:
        """Set the stages that read this stage's outputs."""
        self.latency_model.downstream = tuple(scheduler.latency_model for scheduler in schedulers)

    def apply_plan(self, plan: StagePlan) -> None:
        """Apply a plan: batch size and points with the next batch, the variant once a replica is ready for it."""
        self.plan = plan
        self.latency_model.apply_plan(plan)
        self._set_capacities()
        self.refresh_replicas()

    def set_replicas(self, replicas: Sequence[ReplicaSlots]) -> None:
        """Set the replicas that receive batches; others finish what they hold."""
        self.replicas = list(replicas)
        self._set_capacities()
        self.refresh_replicas()

    def _set_capacities(self) -> None:
        if self.generation is not None:
            for replica in self.replicas:
                replica.set_capacity(self.plan.batch_size)

    def refresh_replicas(self) -> None:
        """Update what depends on the replicas' ready variants. Call it after each change of them."""
        self.ready_replicas = sum(bool(replica.ready_variants) for replica in self.replicas)
        before = self.variant
        self.latency_model.variant = self.variant_selection.effective(self.replicas, self.plan.variant, before)
        self.variant_selection.notify(before, self.variant, self.ready_replicas)
        self.had_replica = self.had_replica or self.ready_replicas > 0
        self._expiry.set_ready(some=self.ready_replicas > 0)
        self._wake()

    def capacity(self) -> StageCapacity:
        """Return the rows that the ready replicas compute at a time, and the seconds of it; 0 seconds if unknown."""
        size = self.plan.batch_size
        seconds = (
            self.latency_model.service_seconds(size) if self.generation is None else self.generation.residence_seconds
        )
        return StageCapacity(self.ready_replicas * size, seconds)

    @property
    def _status(self) -> StageStatus:
        return StageStatus(
            self.plan.batch_size, self.ready_replicas, self._expiry.unready_since, self._min_concurrent_prefills
        )

    @property
    def _min_concurrent_prefills(self) -> int:
        if self.generation is None:
            return 0
        return min((replica.concurrent_prefills for replica in self.replicas if replica.ready_variants), default=0)

    def refusal_of(self, request: StageRequest, now: float) -> Refusal | None:
        """Return why a request is rejected; None if it may be enqueued."""
        return self._admission.refusal_of(request, now, self._status)

    def _drop_reason(self, request: StageRequest, now: float) -> Refusal:
        return self._admission.drop_reason(request, now, self._status)

    def enqueue(self, request: StageRequest) -> None:
        """Enqueue the rows of a stage request, except those that share another encoding. Call `refusal_of` first."""
        row_slice = RowSlice(request, 0, request.rows)
        self._enqueue_rows(row_slice)
        self._arrivals += 1
        self._arrival_rate.note(request.rows, self._clock.now)
        for replica in self.replicas:
            if replica.free or replica.accepts_prefetch:
                self._wake()
                return
        head = self.queue.head()
        if head is not None and head.request is request:  # else nothing changes
            self._wake()

    def _enqueue_rows(self, row_slice: RowSlice, *, again: bool = False) -> None:
        """Enqueue the rows that do not share another encoding; with `again`, do not ask for stored ones."""
        single_flight = self._single_flight
        unshared = [row_slice] if single_flight is None else single_flight.unshared_rows(row_slice, again=again)
        for remaining in unshared:
            self.queue.push(remaining)

    def _on_cached_embedding(self, row_slice: RowSlice, producer: Batch, outputs: Mapping[str, Array] | None) -> None:
        """Complete a row with its stored embedding, or enqueue it if the replica has none."""
        if outputs is not None:
            self._completion.complete_from_cache(row_slice, producer, outputs, self._clock.now)
        elif not row_slice.request.closed:
            self._enqueue_rows(row_slice, again=True)
            self._wake()

    @property
    def partial_prefill(self) -> bool:
        """Whether a replica can start a prompt before all of its images have arrived."""
        return any(replica.partial_prefill for replica in self.replicas)

    def start_early_prefill(self, request: StageRequest) -> None:
        """Add a chat whose images are not all encoded. It starts on idle capacity and is not in the queue."""
        self._early_prefill.add(request)
        self._wake()

    def add_images(self, request: StageRequest, images: Mapping[int, bytes]) -> None:
        """Send encoded images of a chat, by their indices."""
        self._early_prefill.add_images(request, images)

    def complete_images(self, request: StageRequest, images: Mapping[int, bytes]) -> bool:
        """Send the last images of a chat; False if it has not started, and must be enqueued."""
        batch = self._early_prefill.add_images(request, images)
        if batch is None:
            self._early_prefill.remove(request)
            return False
        batch.replica.resume(batch)
        if self.generation is not None:
            self.generation.resume(batch)
        return True

    def cancel(self, request: StageRequest) -> None:
        """Remove a request from the queue, and cancel its generations."""
        self.queue.discard(request)
        if self.generation is not None:
            self.generation.cancel(request)

    def release_embeddings(self, references: Array) -> None:
        """Delete stored embeddings that no replica will pull."""
        cast("EmbeddingTransport", self._transport).release(references)

    def on_batch_end(self, batch: Batch, outcome: BatchOutcome) -> None:
        now = self._clock.now
        try:
            if self._single_flight is not None:
                self._single_flight.on_batch_end(batch, made=isinstance(outcome, Completed))
            if self.generation is not None:
                self._early_prefill.on_batch_end(batch)
                self.generation.on_batch_end(batch, outcome)
            elif isinstance(outcome, Completed):
                self._shadow_evaluation.observe_batch(batch, outcome, self.latency_model.points(batch.variant), now)
                self._stats.observe_batch(batch.key, batch.rows, *self.latency_model.observe(batch, outcome, now))
            self._completion.settle(batch, outcome, now)
            if batch.escalation is not None:
                self._expiry.set_response_timers(batch)
        finally:
            next_batch = batch.replica.release(batch, now)
            if next_batch is not None:
                self._schedule_prefetch(next_batch)
            self._wake()
            self._send_shadow_batch(now)

    def _wake(self) -> None:
        """Dispatch batches once everything that happens now has happened."""
        if not self._wake_pending and (self.queue.rows or self._early_prefill.has_waiting):
            self._wake_pending = True
            self._clock.call_when_idle(self._dispatch_ready, self._pending_arrivals)

    def _pending_arrivals(self) -> int | None:
        full = self.plan.batch_size if self.generation is None else 1
        return None if self.queue.rows >= full else self._arrivals

    def _dispatch_ready(self) -> None:
        """Dispatch all batches that can be dispatched, and drop rows that are late."""
        self._wake_pending = False
        now, queue = self._clock.now, self.queue
        while queue.rows:
            replica = self.variant_selection.least_loaded(self.replicas, self.variant)
            if replica is None or not self._dispatch_next(replica, now):
                break
        for replica in self.replicas:
            if replica.accepts_prefetch and self._has_full_batch():
                self._dispatch_next(replica, now)
        while not self.queue.rows and self._start_next_early_prefill(now):
            pass
        if queue.rows:
            self._expiry.drop_and_set_timer(
                self._view(self.variant, now, concurrent_prefills=self._min_concurrent_prefills)
            )

    def _start_next_early_prefill(self, now: float) -> bool:
        """Start the most urgent partial chat; False if there is none or no capacity is idle."""
        replica = replica_selection.replica_with_capacity(self.replicas, self.plan.variant, self.variant)
        variant = None if replica is None else self.variant_selection.variant_for(replica, self.variant)
        if replica is None or variant is None or self.variant_selection.is_colocated(variant):
            return False
        early_queue = self._early_prefill.next_queue()
        if early_queue is None:
            return False
        decision = self._policy.decide(
            replace(self._view(variant, now, replica.last_point, replica.concurrent_prefills), waiting=early_queue)
        )
        self._early_prefill.remove(early_queue.pop().request)
        if isinstance(decision, Dispatch):
            self._dispatch(replica, variant, decision, now, early=True)
        return True

    def _send_shadow_batch(self, now: float) -> None:
        """Dispatch shadow rows if the queue is empty and a replica is free."""
        if self.queue.rows or not self._shadow_evaluation.waiting:
            return
        replica = self.variant_selection.least_loaded(self.replicas, self.variant)
        if replica is None:
            return
        row_slices = self._shadow_evaluation.next_batch(now, self.latency_model.max_batch_rows(self.variant))
        if row_slices:
            variant = self.variant_selection.variant_for(replica, self.variant) or self.variant
            best = max(self.latency_model.points(variant), key=lambda point: point.accuracy)
            self._dispatch(replica, variant, Dispatch(best, row_slices), now)

    def _has_full_batch(self) -> bool:
        head = self.queue.head()
        return head is not None and not head.attempts and self.queue.batch_candidates(head).rows >= self.plan.batch_size

    def _view(self, variant: str, now: float, loaded_point: str = "", concurrent_prefills: int = 0) -> SchedulerView:
        return SchedulerView(
            now=now,
            waiting=self.queue,
            points=self.latency_model.points(variant, concurrent_prefills if self._policy.prepare is None else 0),
            max_batch_rows=self._max_batch_rows(variant),
            later_seconds=self.latency_model.later_seconds(),
            drop_policy=self._drop_policy,
            ready_replicas=self.ready_replicas,
            free_at=partial(replica_selection.expected_free_times, self.replicas, now),
            mixes_points=self._policy.mixes_points,
            shadow_price=self.latency_model.shadow_price,
            arrivals_rps=self._arrivals_rps,
            loaded_point=loaded_point,
        )

    def _max_batch_rows(self, variant: str) -> int:
        """Return the batch limit. Images are divided between the free encoders, so that the first does not take all."""
        max_rows = self.latency_model.max_batch_rows(variant)
        free = sum(replica.free for replica in self.replicas) if self.stage.encodes else 0
        return min(max_rows, -(-self.queue.rows // free)) if free else max_rows

    def _arrivals_rps(self) -> float:
        return self._arrival_rate.rps(self._clock.now)

    def _dispatch_next(self, replica: ReplicaSlots, now: float) -> bool:
        """Dispatch one batch to a replica; False if none is dispatched."""
        variant = self.variant_selection.variant_for(replica, self.variant) or self.variant
        view = self._view(variant, now, replica.last_point, replica.concurrent_prefills)
        self._expiry.drop_unreachable(view)
        decision = self._decide(view)
        if isinstance(decision, Dispatch):
            self._dispatch(replica, variant, decision, now)
            return True
        if not self.queue.rows and not replica.inflight:
            self.latency_model.relax(variant)
        if decision.time < NEVER:
            self._clock.call_at(decision.time, self._wake)
        return False

    def _decide(self, view: SchedulerView) -> Dispatch | WaitUntil:
        """Ask the policy, and drop the slices it names, until it dispatches or waits."""
        while True:
            decision = self._policy.decide(view)
            dispatched = decision.row_slices if isinstance(decision, Dispatch) else ()
            self.queue.remove((*decision.drops, *dispatched))
            for row_slice in decision.drops:
                self._expiry.drop(row_slice, view.now)
            if isinstance(decision, Dispatch) or not decision.drops or decision.time > view.now:
                return decision

    def _dispatch(
        self, replica: ReplicaSlots, variant: str, dispatch: Dispatch, now: float, *, early: bool = False
    ) -> None:
        row_slices = [row_slice for row_slice in dispatch.row_slices if not row_slice.request.closed]
        duplicates: list[RowSlice] = []
        if self._single_flight is not None:
            row_slices, duplicates = unique_rows(row_slices)
        rows = sum([row_slice.rows for row_slice in row_slices])
        if not rows:  # other rows of these requests were just dropped
            return
        batch = Batch(
            replica=replica,
            variant=variant,
            point=dispatch.point,
            row_slices=row_slices,
            rows=rows,
            dispatched_at=now,
            found_idle=not replica.inflight and self.generation is None,
            escalation=dispatch.escalation,
            early_prefill=early,
            concurrent_prefills=replica.concurrent_prefills,
        )
        self._dispatched_batches += 1
        for row_slice in row_slices:
            batch.note_expected_correct(row_slice)
        replica.assign(batch, self._dispatched_batches)
        self.latency_model.on_dispatch(rows + batch.concurrent_prefills)
        if batch.found_idle:
            self._schedule_prefetch(batch)
        if early:
            self._early_prefill.on_dispatch(batch)
        if self.generation is not None:
            self.generation.send(batch, self.on_batch_end)
        else:
            self._transport.send(batch, self.on_batch_end)
        if self._single_flight is not None:
            self._single_flight.on_dispatch(batch, duplicates, self.queue)

    def _schedule_prefetch(self, batch: Batch) -> None:
        """Open the replica for a full batch shortly before it is free, unless this batch contains a retried slice."""
        for row_slice in batch.row_slices:
            if row_slice.attempts:
                return
        replica, compute_seconds = batch.replica, self.latency_model.compute_seconds(batch)
        due = replica_selection.prefetch_time(
            batch.dispatched_at, replica.completed_at, compute_seconds, replica.transfer_seconds
        )
        if due < NEVER:
            self._clock.call_at(due, partial(self._open_prefetch, batch))

    def _open_prefetch(self, batch: Batch) -> None:
        replica = batch.replica
        if replica.computing is batch and replica.inflight == 1 and replica.ready_variants:
            replica.accepts_prefetch = True
            if self.queue.rows >= self.plan.batch_size:
                self._wake()


def _decide_or_fall_back(policy: Policy, stats: StatsSink, view: SchedulerView) -> Dispatch | WaitUntil:
    try:
        return policy.decide(view)
    except Exception as error:  # noqa: BLE001 - any error would recur with the next decision, and stop the stage
        stats.record_policy_error(error)
        return earliest_deadline_first.decide(view)
