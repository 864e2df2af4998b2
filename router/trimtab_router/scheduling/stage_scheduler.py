"""The desk of a stage: it takes work in, lets batches leave, and gives every member what came back.

Late binding: a batch is formed in the moment a replica is free for it, and never waits in front of a busy one. The desk
knows neither event loop nor wire: a clock, a carrier and a tally are given to it. The router drives it with real ones,
the simulator with its agenda and drawn times; what it decides is the same. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from trimtab_pipelines.plan import StagePlan
from trimtab_pipelines.stages import Stage
from trimtab_protocol.tensors import Array
from trimtab_router.refusal import Refusal
from trimtab_router.scheduling import replica_selection
from trimtab_router.scheduling.accuracy_monitor import AccuracyMonitor
from trimtab_router.scheduling.arrival_rate import ArrivalRate
from trimtab_router.scheduling.batch_completion import BatchCompletion
from trimtab_router.scheduling.batch_outcomes import Completed, Ending
from trimtab_router.scheduling.early_prefill import EarlyPrefill
from trimtab_router.scheduling.expiry import Expiry
from trimtab_router.scheduling.generation import GenerationTracker
from trimtab_router.scheduling.interfaces import Clock, EmbeddingTransport, StatsSink, StreamingTransport, Transport
from trimtab_router.scheduling.latency_model import LatencyModel, StageCapacity
from trimtab_router.scheduling.policies.interface import NEVER, Dispatch, DropPolicy, Policy, SchedulerView, WaitUntil
from trimtab_router.scheduling.policy_fallback import with_fallback
from trimtab_router.scheduling.query_of_death import QueryOfDeathDetector
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.queue_admission import QueueAdmission, StageStatus
from trimtab_router.scheduling.replica_slots import Batch, ReplicaSlots
from trimtab_router.scheduling.shadow_evaluation import ShadowEvaluation
from trimtab_router.scheduling.single_flight import SingleFlight, unique_rows
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest
from trimtab_router.scheduling.variant_selection import VariantSelection


class StageScheduler:
    """The queue of one stage, the slots its batches go to, and what it has learnt.

    Args:
        stage: the stage.
        plan: what it should run at first.
        max_rows: of its queue.
        policy: decides every departure.
        drop_policy: the pipeline's.
        clock: tells the time, and wakes it.
        carrier: takes batches to their slots; for a stage that writes a `Writer`.
        tally: counts.
        suspects: remembers rows that cost replicas; None where rows cannot be told apart.
        grace_seconds: how long rows are held while no replica is ready.
    """

    def __init__(  # noqa: PLR0913 - wired together in one place
        self,
        stage: Stage,
        *,
        plan: StagePlan,
        max_rows: int,
        policy: Policy,
        drop_policy: DropPolicy,
        clock: Clock,
        carrier: Transport | StreamingTransport,
        tally: StatsSink,
        suspects: QueryOfDeathDetector | None,
        grace_seconds: float,
    ) -> None:
        self.stage = stage
        self.plan = plan
        """What it should run."""
        self.queue = DeadlineQueue(max_rows)
        self.outlook = LatencyModel(stage, plan, falls_back=policy.falls_back)
        self.slots: list[ReplicaSlots] = []
        self.ready_replicas = 0
        """Replicas that could serve."""
        self.had_replica = False
        """Whether there ever was one."""
        self.layout = VariantSelection(stage, plan.variant)
        self.watch = AccuracyMonitor(stage)
        self._audits = ShadowEvaluation(stage, self.watch)
        self._returns = BatchCompletion(stage, self.queue, tally, suspects)
        self.writing = (
            GenerationTracker(self.outlook, clock, cast("StreamingTransport", carrier), tally)
            if stage.generates
            else None
        )
        self._door = QueueAdmission(stage, self.queue, self.outlook, self.writing, drop_policy, suspects)
        self._sharing = SingleFlight(cast("EmbeddingTransport", carrier), self._found, tally) if stage.encodes else None
        self._early = EarlyPrefill(cast("StreamingTransport", carrier), tally)
        self._lapses = Expiry(
            self.queue, self.outlook, clock, reason_of=self._reason_of, look=self._look, grace_seconds=grace_seconds
        )
        self._policy = with_fallback(policy, tally)
        self._drop_policy = drop_policy
        self._clock = clock
        self._carrier = carrier
        self._tally = tally
        self._uses = 0
        self._arrivals = 0
        self._pace = ArrivalRate(clock.now)
        self._awake = False

    @property
    def variant(self) -> str:
        """The variant the stage runs now."""
        return self.outlook.variant

    def set_downstream(self, desks: Sequence["StageScheduler"]) -> None:
        """Know the stages that read what this one gives."""
        self.outlook.followers = tuple(desk.outlook for desk in desks)

    def apply_plan(self, plan: StagePlan) -> None:
        """Take a new plan: batch size and operating point from the next batch on, the variant once it is ready."""
        self.plan = plan
        self.outlook.follow(plan)
        self._seat()
        self.refresh_replicas()

    def set_replicas(self, slots: Sequence[ReplicaSlots]) -> None:
        """Send batches to these from now on; those no longer named finish what they hold."""
        self.slots = list(slots)
        self._seat()
        self.refresh_replicas()

    def _seat(self) -> None:
        if self.writing is not None:
            for slot in self.slots:
                slot.set_capacity(self.plan.batch_size)

    def refresh_replicas(self) -> None:
        """See what the slots can serve: call it whenever that changed. It is asked for at every batch."""
        self.ready_replicas = sum(bool(slot.ready_variants) for slot in self.slots)
        before = self.variant
        self.outlook.variant = self.layout.effective(self.slots, self.plan.variant, before)
        self.layout.tell(before, self.variant, self.ready_replicas)
        self.had_replica = self.had_replica or self.ready_replicas > 0
        self._lapses.ready(some=self.ready_replicas > 0)
        self._wake()

    def capacity(self) -> StageCapacity:
        """The rows that its ready replicas compute at a time, and how long that takes; 0 seconds where unknown."""
        size = self.plan.batch_size
        seconds = self.outlook.service_seconds(size) if self.writing is None else self.writing.held_seconds
        return StageCapacity(self.ready_replicas * size, seconds)

    @property
    def _standing(self) -> StageStatus:
        return StageStatus(self.plan.batch_size, self.ready_replicas, self._lapses.unready_since, self._least_company)

    @property
    def _least_company(self) -> int:
        """Beside how many prompts one would be read that left now."""
        if self.writing is None:
            return 0
        return min((slot.company for slot in self.slots if slot.ready_variants), default=0)

    def refusal_of(self, work: StageRequest, now: float) -> Refusal | None:
        """Why this work cannot join the queue; None where it can."""
        return self._door.refusal_of(work, now, self._standing)

    def _reason_of(self, work: StageRequest, now: float) -> Refusal:
        return self._door.reason_of(work, now, self._standing)

    def enqueue(self, work: StageRequest) -> None:
        """Queue all rows of a work, but those that ride along with others. Ask `refusal_of` first."""
        piece = RowSlice(work, 0, work.rows)
        self._push(piece)
        self._arrivals += 1
        self._pace.note(work.rows, self._clock.now)
        for slot in self.slots:
            if slot.free or slot.takes_ahead:
                self._wake()
                return
        head = self.queue.head()
        if head is not None and head.work is work:  # else it changes nothing
            self._wake()

    def _push(self, piece: RowSlice, *, again: bool = False) -> None:
        """Queue a slice, but what rides along or is had from who made it lately; that is not tried `again`."""
        for left in [piece] if self._sharing is None else self._sharing.left_of(piece, again=again):
            self.queue.push(left)

    def _found(self, piece: RowSlice, home: Batch, outputs: Mapping[str, Array] | None) -> None:
        """A replica was asked for a row that it made lately."""
        if outputs is not None:
            self._returns.hand_found(piece, home, outputs, self._clock.now)
        elif not piece.work.closed:
            self._push(piece, again=True)
            self._wake()

    @property
    def reads_ahead(self) -> bool:
        """Whether a replica begins on what is there of a row, before all that it reads is."""
        return any(slot.reads_ahead for slot in self.slots)

    def begin_early(self, work: StageRequest) -> None:
        """Let a row begin on what is there of its images, where a place would idle; it is none of the queue's yet."""
        self._early.add(work)
        self._wake()

    def arrived(self, work: StageRequest, images: Mapping[int, bytes]) -> None:
        """More of a row's images are there, by their numbers."""
        self._early.arrived(work, images)

    def all_arrived(self, work: StageRequest, images: Mapping[int, bytes]) -> bool:
        """The last of a row's images are there; False where it has not begun: then it queues as all others do."""
        parcel = self._early.arrived(work, images)
        if parcel is None:
            self._early.left(work)
            return False
        parcel.slot.go_on(parcel)
        if self.writing is not None:
            self.writing.go_on(parcel)
        return True

    def cancel(self, work: StageRequest) -> None:
        """Free what a request that ended still has here, and what a replica still writes of it."""
        self.queue.discard(work)
        if self.writing is not None:
            self.writing.withdraw(work)

    def release_embeddings(self, references: Array) -> None:
        """Have what replicas keep of images kept no longer."""
        cast("EmbeddingTransport", self._carrier).forget(references)

    def on_batch_end(self, parcel: Batch, ending: Ending) -> None:
        """A batch came back."""
        now = self._clock.now
        try:
            if self._sharing is not None:
                self._sharing.ended(parcel, made=isinstance(ending, Completed))
            if self.writing is not None:
                self._early.ended(parcel)
                self.writing.ended(parcel, ending)
            elif isinstance(ending, Completed):
                self._audits.note(parcel, ending, self.outlook.points(parcel.variant), now)
                self._tally.served(parcel.key, parcel.rows, *self.outlook.learn(parcel, ending, now))
            self._returns.settle(parcel, ending, now)
            if parcel.again is not None:
                self._lapses.hold_provisional(parcel)
        finally:
            follower = parcel.slot.release(parcel, now)
            if follower is not None:
                self._plan_ahead(follower)
            self._wake()
            self._send_audits(now)

    def _wake(self) -> None:
        """Look for batches to send, once all that happens in this moment has happened."""
        if not self._awake and (self.queue.rows or self._early.waiting):
            self._awake = True
            self._clock.soon(self._look, self._stir)

    def _stir(self) -> int | None:
        full = self.plan.batch_size if self.writing is None else 1
        return None if self.queue.rows >= full else self._arrivals

    def _look(self) -> None:
        """Send what can be sent, drop what must be dropped."""
        self._awake = False
        now, queue = self._clock.now, self.queue
        while queue.rows:
            slot = self.layout.least_loaded(self.slots, self.variant)
            if slot is None or not self._send_next(slot, now):
                break
        for slot in self.slots:
            if slot.takes_ahead and self._has_full_batch():
                self._send_next(slot, now)
        while not self.queue.rows and self._begin_next(now):
            pass
        if queue.rows:
            self._lapses.drop_late(self._view(self.variant, now, beside=self._least_company))

    def _begin_next(self, now: float) -> bool:
        """Let the most urgent row begin that does not have all it reads; False where none does, or no place idles."""
        slot = replica_selection.replica_with_capacity(self.slots, self.plan.variant, self.variant)
        variant = None if slot is None else self.layout.variant_of(slot, self.variant)
        if slot is None or variant is None or self.layout.is_whole(variant):  # it is about to read the images itself
            return False
        waiting = self._early.queue()
        if waiting is None:
            return False
        decision = self._policy.decide(replace(self._view(variant, now, slot.point, slot.company), waiting=waiting))
        self._early.left(waiting.pop().work)
        if isinstance(decision, Dispatch):
            self._send(slot, variant, decision, now, early=True)
        return True

    def _send_audits(self, now: float) -> None:
        """Where nobody waits and a replica is free, let rows leave that are only compared."""
        if self.queue.rows or not self._audits.waiting:
            return
        slot = self.layout.least_loaded(self.slots, self.variant)
        batch = self._audits.ready(now, self.outlook.most_rows(self.variant)) if slot is not None else []
        if slot is not None and batch:
            variant = self.layout.variant_of(slot, self.variant) or self.variant
            best = max(self.outlook.points(variant), key=lambda point: point.accuracy)
            self._send(slot, variant, Dispatch(best, batch), now)

    def _has_full_batch(self) -> bool:
        head = self.queue.head()
        return head is not None and not head.attempts and self.queue.batch_candidates(head).rows >= self.plan.batch_size

    def _view(self, variant: str, now: float, loaded: str = "", beside: int = 0) -> SchedulerView:
        return SchedulerView(
            now=now,
            waiting=self.queue,
            points=self.outlook.points(variant, beside if self._policy.prepare is None else 0),
            most_rows=self._most_rows(variant),
            later_seconds=self.outlook.later_seconds(),
            drop_policy=self._drop_policy,
            replicas=self.ready_replicas,
            free_at=partial(replica_selection.free_moments, self.slots, now),
            mixes=self._policy.mixes,
            price=self.outlook.shadow_price,
            arrivals_rps=self._arrivals_rps,
            loaded=loaded,
        )

    def _most_rows(self, variant: str) -> int:
        """As many as a batch may have; images that all wait for free encoders are shared out, else one had them all."""
        most = self.outlook.most_rows(variant)
        free = sum(slot.free for slot in self.slots) if self.stage.encodes else 0
        return min(most, -(-self.queue.rows // free)) if free else most

    def _arrivals_rps(self) -> float:
        return self._pace.rps(self._clock.now)

    def _send_next(self, slot: ReplicaSlots, now: float) -> bool:
        """Let one batch leave for a slot; False where none does."""
        variant = self.layout.variant_of(slot, self.variant) or self.variant
        view = self._view(variant, now, slot.point, slot.company)
        self._lapses.drop_hopeless(view)
        decision = self._decide(view)
        if isinstance(decision, Dispatch):
            self._send(slot, variant, decision, now)
            return True
        if not self.queue.rows and not slot.inflight:
            self.outlook.doubt(variant)
        if decision.moment < NEVER:
            self._clock.at(decision.moment, self._wake)
        return False

    def _decide(self, view: SchedulerView) -> Dispatch | WaitUntil:
        """Ask the policy until it has dropped all that it wants to before it looks again."""
        while True:
            decision = self._policy.decide(view)
            takes = decision.takes if isinstance(decision, Dispatch) else ()
            self.queue.remove((*decision.drops, *takes))
            for piece in decision.drops:
                self._lapses.drop(piece, view.now)
            if isinstance(decision, Dispatch) or not decision.drops or decision.moment > view.now:
                return decision

    def _send(self, slot: ReplicaSlots, variant: str, departure: Dispatch, now: float, *, early: bool = False) -> None:
        batch = [piece for piece in departure.takes if not piece.work.closed]
        doubles: list[RowSlice] = []
        if self._sharing is not None:
            batch, doubles = unique_rows(batch)
        rows = sum([piece.rows for piece in batch])
        if not rows:  # all were of requests of which other rows were just dropped
            return
        parcel = Batch(
            slot=slot,
            variant=variant,
            point=departure.point,
            batch=batch,
            rows=rows,
            departed_at=now,
            found_idle=not slot.inflight and self.writing is None,
            again=departure.again,
            early=early,
            beside=slot.company,
        )
        self._uses += 1
        for piece in batch:
            parcel.promise(piece)
        slot.take(parcel, self._uses)
        self.outlook.departed(rows + parcel.beside)
        if parcel.found_idle:
            self._plan_ahead(parcel)
        if early:
            self._early.begun(parcel)
        if self.writing is not None:
            self.writing.send(parcel, self.on_batch_end)
        else:
            self._carrier.carry(parcel, self.on_batch_end)
        if self._sharing is not None:
            self._sharing.departed(parcel, doubles, self.queue)

    def _plan_ahead(self, parcel: Batch) -> None:
        """Open its slot for a full batch just before it is free, unless it may not survive this one."""
        for piece in parcel.batch:
            if piece.attempts:
                return
        slot, compute_seconds = parcel.slot, self.outlook.compute_seconds(parcel)
        due = replica_selection.prefetch_moment(
            parcel.departed_at, slot.completed_at, compute_seconds, slot.transfer_seconds
        )
        if due < NEVER:
            self._clock.at(due, partial(self._open_ahead, parcel))

    def _open_ahead(self, parcel: Batch) -> None:
        slot = parcel.slot
        if slot.computing is parcel and slot.inflight == 1 and slot.ready_variants:
            slot.takes_ahead = True
            if self.queue.rows >= self.plan.batch_size:
                self._wake()
