"""Stage scheduler: queues the rows of one stage, dispatches batches to replicas, and completes requests.

Late binding: a batch is formed when a replica is free for it and never waits for a busy one, except for a full batch
that is prefetched. The scheduler uses neither an event loop nor a network: clock, transport and statistics are
injected. The router and the simulator share it, so that both decide alike.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from trimtab_pipelines.plan import StagePlan
from trimtab_pipelines.stages import Stage
from trimtab_router.refusal import Refusal
from trimtab_router.scheduling.accuracy_monitor import AccuracyMonitor
from trimtab_router.scheduling.batch_completion import MAX_SUSPECTS, BatchCompletion, QueryOfDeathDetector
from trimtab_router.scheduling.group_sharing import (
    Overflow,
    Server,
    leaves_to_others,
    needs_second_group,
    overflow,
    with_accuracy,
    with_escalation,
)
from trimtab_router.scheduling.interfaces import Clock, Feature, StatsSink, Transport, overrides
from trimtab_router.scheduling.latency_model import LatencyModel, StageCapacity
from trimtab_router.scheduling.outlier_detection import OutlierDetector
from trimtab_router.scheduling.output_monitor import OutputMonitor
from trimtab_router.scheduling.policies import earliest_deadline_first
from trimtab_router.scheduling.policies.interface import (
    NEVER,
    Dispatch,
    DropPolicy,
    Escalation,
    Point,
    Policy,
    SchedulerView,
    WaitUntil,
    least_seconds,
)
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.queue_admission import TIMER_SECONDS, Expiry, QueueAdmission, StageStatus
from trimtab_router.scheduling.replica_selection import ReplicaSelection
from trimtab_router.scheduling.replica_slots import Batch, BatchOutcome, Completed, ReplicaSlots
from trimtab_router.scheduling.shadow_evaluation import ShadowEvaluation
from trimtab_router.scheduling.stage_request import RowSlice, StageRequest

ARRIVAL_WINDOW_SECONDS = 0.5
_ROWS, _HAS_WAITING = attrgetter("rows"), attrgetter("has_waiting")
ReplicaChoice = Callable[[Iterable[ReplicaSlots], str], ReplicaSlots | None]


@dataclass(frozen=True, slots=True)
class StageSnapshot:
    """What a scheduler holds at one moment, for diagnostics."""

    queue_rows: int
    inflight_batches: int
    waiting_partial_chats: int = 0
    started_partial_chats: int = 0
    """Chats in early prefill, until their last token."""
    encodings_in_flight: int = 0
    joined_rows: int = 0
    """Rows that share an encoding in flight."""


class QueueSettings(NamedTuple):
    """Bounds of a stage's queue."""

    max_rows: int
    drop_policy: DropPolicy
    grace_seconds: float
    """Time that rows stay queued while no replica is ready."""


class ArrivalRate:
    """Rows per second over a sliding window. Of the previous window, the share that still lies inside it counts."""

    def __init__(self, now: float) -> None:
        self._window_start = self._first = now
        self._rows = self._before = 0

    def note(self, rows: int, now: float) -> None:
        if now - self._window_start >= ARRIVAL_WINDOW_SECONDS:
            self._roll(now)
        self._rows += rows

    def rps(self, now: float) -> float:
        """Return the rate. At the beginning it is taken over at least half a window."""
        self._roll(now)
        since = now - self._window_start
        kept = self._before * (1.0 - since / ARRIVAL_WINDOW_SECONDS)
        window = min(max(now - self._first, ARRIVAL_WINDOW_SECONDS / 2), ARRIVAL_WINDOW_SECONDS)
        return (self._rows + kept) / window

    def _roll(self, now: float) -> None:
        passed = int((now - self._window_start) / ARRIVAL_WINDOW_SECONDS)
        if passed <= 0:
            return
        self._before, self._rows = self._rows if passed == 1 else 0, 0
        self._window_start += passed * ARRIVAL_WINDOW_SECONDS


class StageScheduler:
    """Scheduler of a prediction stage, whose replicas compute one batch at a time; base class of the other roles."""

    concurrent_rows = False  # whether a replica serves rows concurrently, each as a batch of its own

    def __init__(
        self,
        stage: Stage,
        *,
        plan: StagePlan,
        settings: QueueSettings,
        policy: Policy,
        clock: Clock,
        transport: Transport,
        stats: StatsSink,
        query_of_death: QueryOfDeathDetector | None,
    ) -> None:
        self.stage = stage
        self.plan = plan
        self.policy = replace(policy, decide=partial(_decide_or_fall_back, policy, stats))
        self.queue = DeadlineQueue(settings.max_rows)
        self.latency_model = LatencyModel(
            stage, plan, uses_fallbacks=policy.uses_fallbacks, concurrent_rows=self.concurrent_rows
        )
        self.replicas: list[ReplicaSlots] = []
        self.ready_replicas = 0
        self.had_replica = False  # whether a replica was ever ready
        self.replica_selection = ReplicaSelection(stage, plan.variant)
        self.choose_replica: ReplicaChoice = self.replica_selection.free_replica  # for the head of the queue
        self.accuracy_monitor, self.output_monitor = AccuracyMonitor(stage), OutputMonitor(stage)
        self.completion = BatchCompletion(
            stage,
            self.queue,
            stats,
            query_of_death=query_of_death,
            grace_seconds=settings.grace_seconds if settings.drop_policy == "Never" else 0.0,
        )
        self.features: list[Feature] = [] if query_of_death is None else [query_of_death]
        self.outliers = OutlierDetector(clock, stats, self.wake, retryable=stage.retryable)
        self.features.append(self.outliers)
        if stage.confidence is not None:
            self.features.append(
                ShadowEvaluation(stage, self.accuracy_monitor, self.output_monitor, self.latency_model)
            )
        self._admission = QueueAdmission(self.queue, self.latency_model, settings.drop_policy)
        self._expiry = Expiry(
            self.queue,
            self.latency_model,
            clock,
            drop_reason=self._drop_reason,
            dispatch=self._dispatch_ready,
            grace_seconds=settings.grace_seconds,
        )
        self._drop_policy = settings.drop_policy
        self._clock = clock
        self._transport = transport
        self._stats = stats
        self._dispatched_batches = 0
        self._arrivals = 0
        self._arrival_rate = ArrivalRate(clock.now)
        self.offered_factor: Callable[[], float] = lambda: 1.0  # requests offered over those admitted
        self._wake_pending = False
        self._overflow_due = NEVER
        self._status: StageStatus | None = None
        self.set_up_role()
        self._holding = [feature for feature in self.features if overrides(feature, "on_enqueue")]
        self._waiting = [feature for feature in self.features if overrides(feature, "has_waiting")]
        self._sending = [feature for feature in self.features if overrides(feature, "on_dispatch")]
        self._idling = [feature for feature in self.features if overrides(feature, "on_idle")]
        self._refusing = [feature for feature in self.features if overrides(feature, "refusal_of")]

    def set_up_role(self) -> None: ...

    @property
    def variant(self) -> str:
        return self.latency_model.variant

    def snapshot(self) -> StageSnapshot:
        return StageSnapshot(self.queue.rows, sum(replica.inflight for replica in self.replicas))

    def set_downstream(self, schedulers: Sequence["StageScheduler"]) -> None:
        self.latency_model.set_downstream([scheduler.latency_model for scheduler in schedulers])

    def apply_plan(self, plan: StagePlan) -> None:
        """Apply a plan: batch size and points with the next batch, the variant once a replica is ready for it."""
        self.plan = plan
        self.latency_model.apply_plan(plan)
        self.refresh_replicas()

    def set_replicas(self, replicas: Sequence[ReplicaSlots]) -> None:
        self.replicas = list(replicas)
        self.refresh_replicas()

    def refresh_replicas(self) -> None:
        """Update what depends on the replicas' ready variants. Call it after each change of them."""
        self.ready_replicas = sum(bool(replica.ready_variants) for replica in self.replicas)
        self.outliers.set_replicas(self.replicas)
        before = self.variant
        self.latency_model.set_ready_variants(replica.ready_variants for replica in self.replicas)
        self.latency_model.variant = self.replica_selection.effective_variant(self.replicas, self.plan.variant, before)
        self.latency_model.forget_predictions()
        self._status = None
        self.replica_selection.notify(before, self.variant, self.ready_replicas)
        self.had_replica = self.had_replica or self.ready_replicas > 0
        self._expiry.set_ready(some=self.ready_replicas > 0)
        self._status = None
        self._retry_suspects()
        self.wake()

    def capacity(self) -> StageCapacity:
        return StageCapacity(self._equal_replicas() * self.plan.largest_batch, self.latency_model.occupancy_seconds())

    @property
    def has_slower_points(self) -> bool:
        """Whether the policy may run batches at slower operating points than those of `capacity`."""
        return self.policy.uses_fallbacks and len(self.latency_model.points(self.variant)) > 1

    def _equal_replicas(self) -> int:
        """Return how many replicas at the fastest point of any group serve as many rows as the ready replicas."""
        if not self.plan.other_groups:
            return self.ready_replicas
        model, rows = self.latency_model, self.plan.largest_batch
        fastest = model.service_seconds(rows)
        seconds = [
            least_seconds(model.points(self._variant_of(replica), ready=replica.ready_variants), rows)
            for replica in self.replicas
            if replica.ready_variants
            and (self.plan.variant in replica.ready_variants or not self.plan.second_pass_group)
        ]
        return max(int(sum(fastest / max(own, fastest) for own in seconds if own)), min(self.ready_replicas, 1))

    def status(self) -> StageStatus:
        """Return the state of the stage, the same until its replicas or its plan change."""
        if self._status is None:
            batch_rows, replicas = self.latency_model.full_batch_rows, max(self._equal_replicas(), 1)
            capacity = self.plan.largest_batch * replicas // batch_rows
            self._status = StageStatus(batch_rows, capacity, self._expiry.unready_since, 0)
        return self._status

    def concurrent_prefills(self) -> int:
        return 0

    def refusal_of(self, request: StageRequest, now: float) -> Refusal | None:
        for feature in self._refusing:
            refusal = feature.refusal_of(request, now)
            if refusal is not None:
                return refusal
        refusal = self._admission.refusal_of(request, now, self._status or self.status())
        if refusal is not None:
            self._arrival_rate.note(request.rows, now)  # rejected rows are load too
        return refusal

    def _drop_reason(self, request: StageRequest, now: float) -> Refusal:
        return self._admission.drop_reason(request, now, self.status())

    def enqueue(self, request: StageRequest) -> None:
        """Enqueue the rows of a stage request, except those that a feature holds. Call `refusal_of` first."""
        row_slice = RowSlice(request, 0, request.rows)
        if self._holding:
            row_slices: Sequence[RowSlice] = (row_slice,)
            for feature in self._holding:
                row_slices = [remaining for row_slice in row_slices for remaining in feature.on_enqueue(row_slice)]
            for row_slice in row_slices:
                self.queue.push(row_slice)
        else:
            self.queue.push(row_slice)
        self._arrivals += 1
        self._arrival_rate.note(request.rows, request.enqueued_at)
        now, queue = request.enqueued_at, self.queue
        for replica in self.replicas:
            if replica.free or (replica.prefetch_from <= now and replica.accepts_prefetch(now)):
                self.wake()
                return
        if queue.rows - request.rows < self.plan.batch_size <= queue.rows:
            self._set_prefetch_timers(now)
        head = queue.head()
        if head is not None and head.request is request:  # else nothing changes
            self.wake()

    def cancel(self, request: StageRequest) -> None:
        self.queue.discard(request)

    def on_batch_end(self, batch: Batch, outcome: BatchOutcome) -> None:
        now = self._clock.now
        try:
            for feature in self.features:
                feature.on_batch_end(batch, outcome, now)
            self.observe(batch, outcome, now)
            self.completion.settle(batch, outcome, now)
            if batch.escalation is not None:
                self._expiry.set_response_timers(batch)
        finally:
            next_batch = batch.replica.release(batch, now)
            if next_batch is not None:
                self._schedule_prefetch(next_batch)
            if self.completion.suspects.retried:
                self.completion.suspects.on_batch_end(batch)
            if self.completion.suspects.waiting:
                self._retry_suspects()
            self.wake()

    def learn_exit_codes(self, codes: Mapping[str, int]) -> None:
        """Set the exit codes of replicas that ended, by name."""
        self.completion.suspects.exit_codes = codes
        self._retry_suspects()

    def _retry_suspects(self) -> None:
        """Retry rows that may have ended a replica; of a stage with several, never on the last one."""
        suspects = self.completion.suspects
        if suspects.waiting:
            spares_one = self.ready_replicas > 1 and self.concurrent_rows
            spare = MAX_SUSPECTS if spares_one or self.plan.all_replicas <= 1 else self.ready_replicas - 1
            self.completion.retry_suspects(spare, self._clock.now)
            self.wake()
        if suspects.waiting:
            self._clock.call_at(min([suspect.until for suspect in suspects.waiting]), self._retry_suspects)

    def observe(self, batch: Batch, outcome: BatchOutcome, now: float) -> None:
        if isinstance(outcome, Completed) and not batch.replica.ejection:
            self._stats.observe_batch(batch.key, batch.rows, *self.latency_model.observe(batch, outcome, now))

    def wake(self) -> None:
        if self._wake_pending or not (self.queue.rows or (self._waiting and any(map(_HAS_WAITING, self._waiting)))):
            return
        self._wake_pending = True
        self._clock.call_when_idle(self._dispatch_ready, self._pending_arrivals)

    def _pending_arrivals(self) -> int | None:
        return None if self.queue.rows >= self.latency_model.full_batch_rows else self._arrivals

    def _dispatch_ready(self) -> None:
        self._wake_pending = False
        now, queue, variant = self._clock.now, self.queue, self.latency_model.variant
        waiting: list[ReplicaSlots] = []  # free replicas of some group that serve no row of the queue now
        while queue.rows:
            candidates = self._candidates()
            if waiting:
                candidates = [replica for replica in candidates if replica not in waiting]
            replica = self.choose_replica(candidates, variant)
            if replica is None:
                break
            if not self._dispatch_next(replica, now):
                if not self.plan.other_groups:
                    break
                waiting.append(replica)
        if queue.rows >= self.plan.batch_size:
            self._prefetch(now)
        if queue.rows:
            self._expiry.drop_and_set_timer(self.view(variant, now))
        else:
            for feature in self._idling:
                feature.on_idle(self, now)

    def _candidates(self) -> Sequence[ReplicaSlots]:
        """Return the replicas that may serve the head of the queue: a retried slice goes to another replica.

        While some replicas still load variants, those with all of them go first, since they can serve any row.
        """
        head, model = self.queue.head(), self.latency_model
        replicas = self.replicas if head is None or not head.failed_on else self.outliers.candidates(head.failed_on)
        if not model.other_variants or self.plan.other_groups:
            return replicas
        return [slot for slot in replicas if slot.free and model.other_variants <= slot.ready_variants] or replicas

    def _prefetch(self, now: float) -> None:
        """Send full batches to replicas that will soon be free, now or at the time."""
        for replica in self.replicas:
            if replica.accepts_prefetch(now) and self._has_full_batch():
                self._dispatch_next(replica, now)
        self._set_prefetch_timers(now)

    def _has_full_batch(self) -> bool:
        head = self.queue.head()
        return head is not None and not head.attempts and self.queue.batch_candidates(head).rows >= self.plan.batch_size

    def view(self, variant: str, now: float, replica: ReplicaSlots | None = None) -> SchedulerView:
        """Return what the policy sees of the stage if a replica is free; None: of the stage as a whole."""
        prefills, alike, model = 0, self.replicas, self.latency_model
        later_seconds = model.later_seconds()
        if self.concurrent_rows and self.policy.prepare is None:
            prefills = self.concurrent_prefills() if replica is None else replica.concurrent_prefills
        if replica is not None and self.plan.other_groups:
            alike = [other for other in alike if other.ready_variants == replica.ready_variants]
        return SchedulerView(
            now=now,
            waiting=self.queue,
            points=model.points(variant, prefills, None if replica is None else replica.ready_variants),
            max_batch_rows=model.max_batch_rows(variant),
            later_seconds=later_seconds,
            drop_policy=self._drop_policy,
            reserved_seconds=model.reserved_seconds(later_seconds),
            ready_replicas=self.ready_replicas if alike is self.replicas else len(alike),
            free_at=partial(_expected_free_times, alike, now),
            concurrent_rows=self.concurrent_rows,
            mixes_points=self.policy.mixes_points,
            shadow_price=model.shadow_price,
            arrivals_rps=partial(self._offered_rps, now),
            loaded_point=("", "") if replica is None else replica.last_point,
            planned_batch_rows=self.plan.batch_size,
        )

    def _offered_rps(self, now: float) -> float:
        """Return the rows per second that would arrive if no request was rejected."""
        return self._arrival_rate.rps(now) * self.offered_factor()

    def _variant_of(self, replica: ReplicaSlots) -> str:
        """Return the variant of a replica; of another group than the planned variant's, one that the plan lists."""
        current = self.latency_model.variant
        variant = self.replica_selection.variant_for(replica, current) or current
        if variant == current or not self.plan.other_groups:
            return variant
        return min(self.latency_model.other_variants & replica.ready_variants, default=variant)

    def _overflow(self, view: SchedulerView, replica: ReplicaSlots) -> Overflow:
        """Return the rows that busy replicas of more accurate groups leave to this one."""
        model, planned = self.latency_model, (self.plan.variant, self.plan.operating_point)
        best, servers = max(point.accuracy for point in view.points), []
        for other in self.replicas:
            if other.ready_variants and not other.free and not other.ejection and other is not replica:
                points = model.points(self._variant_of(other), ready=other.ready_variants)
                point = max(points, key=lambda point: (point.key == planned, point.accuracy))
                if point.accuracy > best:
                    rows = model.max_batch_rows(point.variant)
                    servers.append(Server(other.expected_free_time(view.now), point.seconds(rows), rows))
        if not servers:
            return Overflow(view.max_batch_rows)
        return overflow(
            self.queue, servers, view.later_seconds, lambda rows: bool(view.points_for(rows)), view.max_batch_rows
        )

    def _dispatch_next(self, replica: ReplicaSlots, now: float) -> bool:
        variant, grouped = self._variant_of(replica), bool(self.plan.other_groups)
        view = self.view(variant, now, replica)
        offers_all = not grouped and self.latency_model.other_variants <= replica.ready_variants
        whole = None if offers_all else self.view(self.variant, now)
        self._expiry.drop_unreachable(whole or view)
        shared = self._shared_view(view, whole or view, replica) if grouped else view
        if shared is None:
            return False
        decision = self._decide(shared, whole)
        if isinstance(decision, Dispatch):
            if grouped:
                decision = with_escalation(decision, view.points, self._second_pass(view.points, replica))
            self.dispatch(replica, decision, now)
            return True
        if not self.queue.rows and not replica.inflight:
            self.latency_model.relax(variant)
        if decision.time < NEVER:
            self._clock.call_at(decision.time, self.wake)
        return False

    def _shared_view(self, view: SchedulerView, whole: SchedulerView, replica: ReplicaSlots) -> SchedulerView | None:
        """Return the part of a view that one of several groups may serve now; None if it may serve nothing."""
        plan = self.plan
        if not plan.second_pass_group:
            rows, until = self._overflow(view, replica)
            if rows:
                return replace(view, max_batch_rows=min(view.max_batch_rows, rows))
            self._check_overflow_at(until)
            return None
        second_pass = self._second_pass(view.points, replica)
        if second_pass is not None:
            return replace(view, points=with_accuracy(view.points, plan, second_pass.accuracy))
        first_group = [other for other in self.replicas if plan.variant in other.ready_variants]
        if replica in first_group or all(other.ejection for other in first_group):
            return view
        waiting = self.queue.only(partial(needs_second_group, view, whole))
        return replace(view, waiting=waiting) if waiting.rows else None

    def _second_pass(self, points: Sequence[Point], replica: ReplicaSlots) -> Escalation | None:
        """Return the planned escalation if another group than the replica's serves the second pass."""
        plan, group, planned = self.plan, self.plan.second_pass_group, self.plan.planned_escalation
        if planned is None or not group or group in replica.ready_variants or not self.latency_model.offers(group):
            return None
        wanted = planned.target(plan.variant), planned.confidence_below
        first = (point for point in points if point.key == (plan.variant, plan.operating_point))
        rules = (rule for point in first for rule in point.escalations)
        return next((rule for rule in rules if (rule.target, rule.confidence_below) == wanted), None)

    def _check_overflow_at(self, due: float) -> None:
        if due < NEVER and not self._clock.now < self._overflow_due <= due:
            self._overflow_due = due
            self._clock.call_at(due + TIMER_SECONDS, self.wake)

    def _decide(self, view: SchedulerView, whole: SchedulerView | None) -> Dispatch | WaitUntil:
        """Ask the policy, and drop the slices it names, until it dispatches or waits.

        `whole`: the view of the stage if the replica lacks points of other replicas, which may serve these slices.
        """
        while True:
            decision = self.policy.decide(view)
            if whole is not None:
                drops = [row_slice for row_slice in decision.drops if not whole.points_for(row_slice)]
                if (
                    isinstance(decision, Dispatch)
                    and self.plan.other_groups
                    and leaves_to_others(decision, view, whole)
                ):
                    decision = WaitUntil(drops=drops)
                elif decision.drops:
                    dispatches = isinstance(decision, Dispatch)
                    decision = replace(decision, drops=drops) if drops or dispatches else WaitUntil()
            dispatched = decision.row_slices if isinstance(decision, Dispatch) else ()
            self.queue.remove((*decision.drops, *dispatched))
            for row_slice in decision.drops:
                self._expiry.drop(row_slice, view.now)
            if isinstance(decision, Dispatch) or not decision.drops or decision.time > view.now:
                return decision

    def dispatch(self, replica: ReplicaSlots, dispatch: Dispatch, now: float, *, early: bool = False) -> None:
        """Send the rows of a decision that are still needed to a replica; `early`: before all images are encoded."""
        row_slices = self.rows_to_send(dispatch.row_slices)
        rows = sum(map(_ROWS, row_slices))
        if not rows:  # other rows of these requests were just dropped
            return
        batch = Batch(
            replica=replica,
            variant=dispatch.point.variant,
            point=dispatch.point,
            row_slices=row_slices,
            rows=rows,
            dispatched_at=now,
            found_idle=not replica.inflight and not replica.capacity,
            escalation=dispatch.escalation,
            early_prefill=early,
            weight=self.latency_model.service_times.row_weight(dispatch.point.key) if self.concurrent_rows else 1,
            concurrent_prefills=replica.concurrent_prefills if self.concurrent_rows else 0,
        )
        self._dispatched_batches += 1
        for row_slice in row_slices:
            if row_slice.request.accuracy_floor:
                batch.note_expected_correct(row_slice)
        replica.assign(batch, self._dispatched_batches)
        self.latency_model.on_dispatch(rows + batch.concurrent_prefills)
        if batch.found_idle:
            self._schedule_prefetch(batch)
        self.send(batch)
        for feature in self._sending:
            feature.on_dispatch(batch)

    def rows_to_send(self, row_slices: Sequence[RowSlice]) -> list[RowSlice]:
        return [row_slice for row_slice in row_slices if not row_slice.request.closed]

    def send(self, batch: Batch) -> None:
        self._transport.send(batch, self.on_batch_end)

    def _schedule_prefetch(self, batch: Batch) -> None:
        """Open the replica for a full batch shortly before it is free, unless this batch contains a retried slice."""
        for row_slice in batch.row_slices:
            if row_slice.attempts:
                return
        expected_seconds = self.latency_model.service_times.expect(batch.key, batch.rows)
        batch.replica.prefetch_from = batch.replica.prefetch_time(batch.dispatched_at, expected_seconds)

    def _set_prefetch_timers(self, now: float) -> None:
        """Set a timer for each computing replica: a full batch waits."""
        for replica in self.replicas:
            due = replica.prefetch_from
            if now < due < NEVER and due != replica.prefetch_timer:
                replica.prefetch_timer = due
                self._clock.call_at(due, partial(self._on_prefetch_timer, replica))

    def _on_prefetch_timer(self, replica: ReplicaSlots) -> None:
        if self.queue.rows >= self.plan.batch_size and replica.accepts_prefetch(self._clock.now):
            self.wake()


def _expected_free_times(replicas: Sequence[ReplicaSlots], now: float) -> list[float]:
    return sorted([replica.expected_free_time(now) for replica in replicas if replica.ready_variants])


def _decide_or_fall_back(policy: Policy, stats: StatsSink, view: SchedulerView) -> Dispatch | WaitUntil:
    try:
        return policy.decide(view)
    except Exception as error:  # noqa: BLE001 - any error would recur with the next decision, and stop the stage
        stats.record_policy_error(error)
        return earliest_deadline_first.decide(view)
