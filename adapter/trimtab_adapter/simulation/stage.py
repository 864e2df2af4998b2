"""One stage in a simulation: the router's queue, batch forming, dropping and binding, driven by simulated time.

What decides is the router's own code. What is written anew here is the doing around it, which in the router is asyncio
(`dispatch`, `delivery`): when to look, what a batch's end sets off, what becomes of the rows of a lost replica.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from trimtab_adapter.simulation.agenda import Agenda
from trimtab_adapter.simulation.chance import FanOut, ServiceTimes
from trimtab_adapter.simulation.replica import Machine, Parcel, SimulatedReplica
from trimtab_pipelines.plan import StagePlan
from trimtab_pipelines.spec import Stage
from trimtab_protocol.tensors import Array
from trimtab_router import batching, binding
from trimtab_router.delivery import MAX_LOST_REPLICAS
from trimtab_router.dispatch import DOOR_SHARE, TYPICAL_WEIGHT
from trimtab_router.policies import BatchView, Policy
from trimtab_router.queue import DeadlineQueue
from trimtab_router.refusal import Code, Refusal
from trimtab_router.service_time import WEIGHT, Key
from trimtab_router.service_time import ServiceTimes as Estimates
from trimtab_router.work import Served, Slice, Work

_TIMER_SECONDS = 0.0005  # the router's timers fire that much after the moment they wait for


@dataclass(slots=True)
class Batches:
    """What was sent: batches and rows."""

    sent: int = 0
    rows: int = 0


@lru_cache(maxsize=4096)
def rows_of(count: int) -> Array:
    """Return an array of so many rows; only its length means anything."""
    return np.zeros(count, dtype=np.int8)


class SimulatedStage:
    """The queue of one stage and the replicas that serve it.

    Args:
        stage: the stage.
        plan: what it should run at first.
        agenda: the clock.
        times: draws the seconds of its batches.
        fan_outs: draws the rows of its counted outputs, by the name of the count.
        drop_policy: the pipeline's.
        max_rows: of its queue.
        policy: chooses the operating point of each batch.
        transfer_seconds: of each service time, what passes on the way.
        machine: that all stages share.
        grace_seconds: how long rows are held while no replica is ready.
        on_idle: called when a replica that drains has no batch left.
    """

    def __init__(  # noqa: PLR0913 - wired together in one place
        self,
        stage: Stage,
        *,
        plan: StagePlan,
        agenda: Agenda,
        times: ServiceTimes,
        fan_outs: Mapping[str, FanOut],
        drop_policy: batching.DropPolicy,
        max_rows: int,
        policy: Policy,
        transfer_seconds: float,
        machine: Machine,
        grace_seconds: float,
        on_idle: Callable[[SimulatedReplica], None],
    ) -> None:
        self.stage = stage
        self.plan = plan
        self.queue = DeadlineQueue(max_rows)
        self.replicas: list[SimulatedReplica] = []
        self.followers: tuple[SimulatedStage, ...] = ()
        self.batches = Batches()
        self._agenda = agenda
        self._draws = times
        self._fan_outs = fan_outs
        self._drop_policy = drop_policy
        self._policy = policy
        self._transfer_seconds = transfer_seconds
        self._machine = machine
        self._grace_seconds = grace_seconds
        self._on_idle = on_idle
        self._estimates = Estimates()
        self._compute = Estimates()
        self._typical_rows = 1.0
        self._uses = 0
        self.variant = plan.variant
        """What the stage runs now."""
        self.ready_replicas = 0
        self._unready_since: float | None = 0.0
        self._timer_due = float("inf")
        self._pump_scheduled = False
        self._points = {(v.name, p.name): p for v in stage.variants for p in v.points}
        self.follow(plan)

    def look_around(self) -> None:
        """See which replicas there are: call it whenever one came, went or closed. It is asked for at every batch."""
        self.ready_replicas = sum(replica.state == "ready" for replica in self.replicas)
        self.variant = binding.effective_variant(self.replicas, self.plan.variant, self.variant)
        if self.ready_replicas:
            self._unready_since = None
        elif self._unready_since is None:
            self._unready_since = self._agenda.now
        self.wake()

    @property
    def service_ratio(self) -> float:
        """Observed over profiled service time of what runs now."""
        return self._estimates.ratio(self._key(self.variant))

    def follow(self, plan: StagePlan) -> None:
        """Take a new plan."""
        self.plan = plan
        self._estimates.set_profile((plan.variant, plan.operating_point), plan.service_seconds)
        self.look_around()

    def service_seconds(self, rows: int) -> float:
        """Predicted seconds of a batch of so many rows as planned."""
        return self._estimates.predict(self._key(self.variant), rows)

    def later_seconds(self) -> float:
        """Predicted seconds of the stages after this one, along the longest path and without queueing."""
        return max((f.service_seconds(round(f._typical_rows)) + f.later_seconds() for f in self.followers), default=0.0)  # noqa: SLF001

    def turned_away(self, work: Work, now: float) -> Refusal | None:
        """Why this work cannot join the queue; None where it can."""
        queue, name = self.queue, self.stage.name
        if not queue.has_room(work.rows):
            return Refusal(Code.RESOURCE_EXHAUSTED, "QueueFull", "", stage=name)
        judged = self._drop_policy == "Predicted" and self._unready_since is None
        if not judged or not (ahead := queue.rows_before(work.deadline)):
            return None
        size = self.plan.batch_size
        wait = ahead // size * self.service_seconds(size) / max(self.ready_replicas, 1)
        needed = wait + self.service_seconds(min(work.rows, size)) + self.later_seconds()
        if needed <= DOOR_SHARE * (work.deadline - now):
            return None
        return Refusal(Code.DEADLINE_EXCEEDED, "Predicted", "", stage=name)

    def enqueue(self, work: Work) -> None:
        """Queue all rows of a work."""
        queue = self.queue
        last = queue.rows and queue.rows_before(work.deadline) >= queue.rows
        queue.push(Slice(work, 0, work.rows))
        # Behind others, with nobody to take it, it changes nothing unless it fills the batch that a replica waits for.
        if not last or any(replica.free or replica.takes_ahead for replica in self.replicas):
            self.wake()

    def wake(self) -> None:
        """Look for batches to send, once all that happens in this moment has happened."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._agenda.at(self._agenda.now, self.pump)

    def pump(self) -> None:
        """Send what can be sent, drop what must be dropped."""
        self._pump_scheduled = False
        now, queue = self._agenda.now, self.queue
        if not queue.rows:
            return
        while queue.rows:
            replica = binding.least_loaded(self.replicas, self.plan.variant)
            if replica is None:
                break
            self._send_next(replica, now)
        for replica in self.replicas:
            full = replica.takes_ahead and (head := queue.head()) and queue.rows_beside(head) >= self.plan.batch_size
            if full:
                self._send_next(replica, now)
        self._drop_late(now)

    def lose(self, replica: SimulatedReplica) -> None:
        """A replica died: its batches go back to where they were by their deadlines."""
        replica.close("gone")
        self.replicas.remove(replica)
        self._machine.busy -= bool(replica.held)
        for number, parcel in enumerate(replica.held):  # the first was computed, the others only waited
            for piece in parcel.batch:
                self._retry(piece, suspected=number == 0)
        replica.held = []
        self.look_around()

    def _retry(self, piece: Slice, *, suspected: bool) -> None:
        if piece.work.closed:
            return
        attempts = piece.attempts + suspected
        if attempts >= MAX_LOST_REPLICAS:
            piece.work.owner.work_refused(Refusal(Code.INTERNAL, "ModelServerError", "", stage=self.stage.name))
        else:
            self.queue.push(Slice(piece.work, piece.start, piece.stop, attempts, piece.alone or suspected))

    def _key(self, variant: str) -> Key:
        if variant == self.plan.variant:
            return variant, self.plan.operating_point
        return variant, self.stage.variant(variant).points[0].name

    def _terms(self, variant: str) -> batching.Terms:
        key, predict = self._key(variant), self._estimates.predict
        return batching.Terms(
            max_rows=min(self.plan.batch_size, self.stage.variant(variant).max_batch_size),
            service_seconds=lambda rows: predict(key, rows),
            later_seconds=self.later_seconds(),
            drop_policy=self._drop_policy,
            replicas=self.ready_replicas,
        )

    def _send_next(self, replica: SimulatedReplica, now: float) -> None:
        variant = binding.variant_for(replica.ready_variants, self.plan.variant, self.variant) or self.variant
        terms = self._terms(variant)
        formed = batching.form_batch(self.queue, now, terms)
        for piece in formed.dropped:
            self._drop(piece.work, now)
        if formed.batch:
            rows = sum(piece.rows for piece in formed.batch)
            self._typical_rows += TYPICAL_WEIGHT * (rows - self._typical_rows)
            slack = formed.batch[0].work.deadline - now - terms.later_seconds
            parcel = Parcel(variant, self._choose_point(variant, rows, slack), formed.batch, rows, now)
            self._deliver(replica, parcel)
        elif not replica.inflight:
            self._doubt_predictions(variant)

    def _deliver(self, replica: SimulatedReplica, parcel: Parcel) -> None:
        now, one_way = parcel.departed_at, self._transfer_seconds / 2.0
        parcel.found_idle = replica.inflight == 0
        others = self._machine.busy - (not parcel.found_idle)
        seconds = self._draws.draw(parcel.variant, parcel.point, parcel.rows) - self._transfer_seconds
        begin = max(now + one_way, replica.computing_until)
        replica.computing_until = self._machine.finish(begin, max(seconds, 0.0), others, replica.processor)
        parcel.compute_seconds = replica.computing_until - begin
        self._machine.busy += parcel.found_idle
        self._uses += 1
        replica.take(parcel, self._uses)
        self.batches.sent += 1
        self.batches.rows += parcel.rows
        self._agenda.at(replica.computing_until + one_way, partial(self._completed, replica, parcel))
        if parcel.found_idle:
            self._plan_ahead(replica, parcel)

    def _choose_point(self, variant: str, rows: int, slack_seconds: float) -> str:
        plan = self.plan
        if variant != plan.variant:
            return self.stage.variant(variant).points[0].name
        return self._policy(
            BatchView(
                rows=rows,
                slack_seconds=slack_seconds,
                planned_point=plan.operating_point,
                fallback_points=plan.fallback_operating_points,
                predict_seconds=lambda point: self._estimates.predict((variant, point), rows),
            )
        )

    def _plan_ahead(self, replica: SimulatedReplica, parcel: Parcel) -> None:
        """Open the replica for a full batch just before it is free."""
        compute = self._compute.expect((parcel.variant, parcel.point), parcel.rows)
        due = binding.send_ahead_at(parcel.departed_at, replica.completed_at, compute, replica.transfer_seconds)
        if due < float("inf"):
            self._agenda.at(due, partial(self._open_ahead, replica, parcel))

    def _open_ahead(self, replica: SimulatedReplica, parcel: Parcel) -> None:
        if replica.inflight == 1 and replica.state == "ready" and replica.held[0] is parcel:
            replica.takes_ahead = True
            if self.queue.rows >= self.plan.batch_size:
                self.pump()

    def _completed(self, replica: SimulatedReplica, parcel: Parcel) -> None:
        if replica.state == "gone":
            return
        now = self._agenda.now
        self._learn(replica, parcel, now)
        self._hand_out(parcel, now)
        replica.release(parcel, now)
        if replica.held:
            self._plan_ahead(replica, replica.held[0])
        else:
            self._machine.busy -= 1
            if replica.state == "draining":
                self._on_idle(replica)
        self.pump()

    def _learn(self, replica: SimulatedReplica, parcel: Parcel, now: float) -> None:
        key, rows = (parcel.variant, parcel.point), parcel.rows
        seconds = now - max(parcel.departed_at, replica.completed_at)
        self._estimates.observe(key, rows, seconds)
        self._compute.observe(key, rows, parcel.compute_seconds)
        if parcel.found_idle:
            transfer = max(seconds - parcel.compute_seconds, 0.0)
            replica.transfer_seconds += WEIGHT * (transfer - replica.transfer_seconds)

    def _hand_out(self, parcel: Parcel, now: float) -> None:
        accuracy = self._points[parcel.variant, parcel.point].accuracy
        for piece in parcel.batch:
            work = piece.work
            if work.closed:
                continue
            served = Served(
                variant=parcel.variant,
                operating_point=parcel.point,
                batch_rows=parcel.rows,
                queue_seconds=parcel.departed_at - work.enqueued_at,
                service_seconds=now - parcel.departed_at,
                accuracy=accuracy,
                departed_unix_nanoseconds=0,
            )
            work.add_piece(piece.start, piece.rows, self._outputs(piece.rows), served)

    def _outputs(self, rows: int) -> dict[str, Array]:
        own = rows_of(rows)
        counted = {name: rows_of(fan_out.draw(rows)) for name, fan_out in self._fan_outs.items()}
        return {o.name: own if o.counted_by is None else counted[o.counted_by] for o in self.stage.outputs}

    def _doubt_predictions(self, variant: str) -> None:
        self._estimates.doubt(self._key(variant))
        for stage in self.followers:
            stage._doubt_predictions(stage.variant)  # noqa: SLF001 - the same class

    def _drop_late(self, now: float) -> None:
        """Drop what can no longer make it, and look again when the next one cannot."""
        queue = self.queue
        if not queue.rows:
            return
        terms = self._terms(self.variant)
        for piece in batching.drop_hopeless(queue, now, terms):
            self._drop(piece.work, now)
        while (head := queue.head()) is not None and self._grace_ends(head) <= now:
            self._drop(queue.pop().work, now)
        if head is not None:
            due = min(batching.drop_time(head, terms), self._grace_ends(head))
            if due < self._timer_due:
                self._timer_due = due
                self._agenda.at(max(due, now) + _TIMER_SECONDS, self._timer_fired)

    def _timer_fired(self) -> None:
        if self._timer_due <= self._agenda.now:
            self._timer_due = float("inf")
            self.pump()

    def _grace_ends(self, head: Slice) -> float:
        if self._unready_since is None:
            return float("inf")
        return max(self._unready_since, head.work.enqueued_at) + self._grace_seconds

    def _drop(self, work: Work, now: float) -> None:
        if work.closed:
            return
        if self._unready_since is not None:
            refusal = Refusal(Code.UNAVAILABLE, "NoReplica", "", stage=self.stage.name)
        else:
            reason = "Past" if work.deadline <= now else "Predicted"
            refusal = Refusal(Code.DEADLINE_EXCEEDED, reason, "", stage=self.stage.name)
        work.owner.work_refused(refusal)
