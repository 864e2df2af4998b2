"""Late binding: a batch is formed in the moment a replica is free for it, and never waits in front of a busy one.

One dispatcher a stage. It owns the stage's queue, follows plan and replicas, and drops what cannot make it. What it
decides by (queue, batching, binding, policies) is pure; here is only the doing. What becomes of a batch that left is
in `delivery`.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from trimtab_pipelines.plan import StagePlan
from trimtab_pipelines.spec import Stage
from trimtab_router import batching, binding
from trimtab_router.delivery import Delivery
from trimtab_router.metrics import StageMetrics
from trimtab_router.policies import Policy
from trimtab_router.queue import DeadlineQueue
from trimtab_router.refusal import Code, Refusal
from trimtab_router.replicas import Replica
from trimtab_router.service_time import Key
from trimtab_router.suspects import Suspects
from trimtab_router.work import Slice, Work

TYPICAL_WEIGHT = 0.1
DOOR_SHARE = 0.8
"""Of the time to its deadline, what a request may be predicted to need when it joins a queue: in overload all who are
let in wait as long as the prediction allows, and with nothing to spare each error of it would make one of them late."""
QUIET_TURNS = 16


@dataclass(frozen=True, slots=True)
class Carries:
    """Rows computed at a time, and the seconds of it."""

    rows: int
    seconds: float


class Dispatcher:
    """The queue of one stage and the replicas that serve it.

    Args:
        stage: the stage.
        datatypes: the datatype of each of its inputs.
        plan: what it should run at first.
        queue: its queue.
        policy: chooses the operating point of each batch.
        drop_policy: the pipeline's.
        metrics: of this stage.
        suspects: remembers rows that cost replicas.
        grace_seconds: how long rows are held while no replica is ready.
        hang_seconds: the least time after which a replica that does not answer counts as lost.
        max_answer_bytes: of an answer whose size the stage leaves open.
    """

    def __init__(  # noqa: PLR0913 - wired together in one place
        self,
        stage: Stage,
        *,
        datatypes: Mapping[str, str],
        plan: StagePlan,
        queue: DeadlineQueue,
        policy: Policy,
        drop_policy: batching.DropPolicy,
        metrics: StageMetrics,
        suspects: Suspects,
        grace_seconds: float,
        hang_seconds: float,
        max_answer_bytes: int,
    ) -> None:
        self.stage = stage
        self.plan = plan
        self.queue = queue
        self.metrics = metrics
        self._delivery = Delivery(
            stage,
            datatypes=datatypes,
            queue=queue,
            policy=policy,
            metrics=metrics,
            wake=self.wake,
            suspects=suspects,
            hang_seconds=hang_seconds,
            max_answer_bytes=max_answer_bytes,
        )
        self._times = self._delivery.times
        self.replicas: dict[str, Replica] = {}
        self._drop_policy = drop_policy
        self.followers: tuple[Dispatcher, ...] = ()
        self._typical_rows = 1.0
        self._grace_seconds = grace_seconds
        self._loop = asyncio.get_running_loop()
        self._variant = plan.variant
        self.had_replica = False
        """Whether there ever was a replica that could serve."""
        self._unready_since: float | None = time.monotonic()
        self._pump_scheduled = False
        self._arrivals = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = float("inf")
        self.follow(plan)
        metrics.watch(lambda: self.queue.rows, lambda: self.ready_replicas)

    @property
    def variant(self) -> str:
        """The variant the stage runs now."""
        self._variant = binding.effective_variant(self.replicas.values(), self.plan.variant, self._variant)
        return self._variant

    @property
    def ready_replicas(self) -> int:
        """Replicas that could serve."""
        return sum(bool(replica.ready_variants) for replica in self.replicas.values())

    def service_seconds(self, rows: int) -> float:
        """Predicted seconds of a batch of so many rows as planned; 0 where nothing is known."""
        return self._times.predict(self._key(self._variant), rows)

    def later_seconds(self) -> float:
        """Predicted seconds of the stages after this one, along the longest path and without queueing."""
        return max((stage.typical_seconds() + stage.later_seconds() for stage in self.followers), default=0.0)

    def typical_seconds(self) -> float:
        """Predicted seconds of a batch as they have been lately."""
        return self.service_seconds(round(self._typical_rows))

    def follow(self, plan: StagePlan) -> None:
        """Take a new plan: batch size and operating point from the next batch on, the variant once it is ready."""
        self.plan = plan
        self._times.set_profile((plan.variant, plan.operating_point), plan.service_seconds)
        self.wake()

    def enqueue(self, work: Work) -> None:
        """Queue all rows of a work. Ask `queue.has_room` first."""
        self.queue.push(Slice(work, 0, work.rows))
        self._arrivals += 1
        self.wake()

    def withdraw(self, work: Work) -> None:
        """Free what a request that ended still has here."""
        self.queue.discard(work)

    def wake(self) -> None:
        """Look for batches to send, once all that happens in this moment has happened."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump_once_settled, self._arrivals, 0)

    def _pump_once_settled(self, arrivals: int, quiet_turns: int) -> None:
        """Let requests that are being read right now join: wait until a few turns of the loop bring no more.

        It costs an idle router some ten microseconds, and a busy one nothing: what it would read next is read now.
        """
        if self.queue.rows >= self.plan.batch_size or quiet_turns >= QUIET_TURNS:
            self._pump()
        else:
            quiet_turns = quiet_turns + 1 if arrivals == self._arrivals else 0
            self._loop.call_soon(self._pump_once_settled, self._arrivals, quiet_turns)

    def carries(self) -> "Carries":
        """The rows that its ready replicas compute at a time, and how long that takes; 0 seconds where unknown."""
        return Carries(self.ready_replicas * self.plan.batch_size, self.service_seconds(self.plan.batch_size))

    def expected_wait_seconds(self, deadline: float = float("inf")) -> float:
        """How long rows with such a deadline that join the queue now will wait for their departure."""
        batches = self.queue.rows_before(deadline) // max(self.plan.batch_size, 1)
        return batches * self.service_seconds(self.plan.batch_size) / max(self.ready_replicas, 1)

    def hopeless_at_the_door(self, work: Work, now: float) -> Refusal | None:
        """Why this work would only be dropped later if it joined the end of the queue; None where it may make it.

        Waiting in vain would cost the caller time and the queue its room. Only the rows ahead of it count, those more
        urgent: how patient others are neither helps nor harms it.
        """
        judged = self._drop_policy == "Predicted" and self._unready_since is None
        if not judged or not self.queue.rows_before(work.deadline):
            return None
        wait = self.expected_wait_seconds(work.deadline)
        service = self.service_seconds(min(work.rows, self.plan.batch_size))
        if wait + service + self.later_seconds() <= DOOR_SHARE * (work.deadline - now):
            return None
        return self._predicted_late(work, now, wait)

    @property
    def service_ratio(self) -> float:
        """Observed over profiled service time of what runs now."""
        return self._times.ratio(self._key(self.variant))

    def _key(self, variant: str) -> Key:
        if variant == self.plan.variant:
            return variant, self.plan.operating_point
        return variant, self.stage.variant(variant).points[0].name

    def _terms(self, variant: str) -> batching.Terms:
        key = self._key(variant)
        return batching.Terms(
            max_rows=min(self.plan.batch_size, self.stage.variant(variant).max_batch_size),
            service_seconds=lambda rows: self._times.predict(key, rows),
            later_seconds=self.later_seconds(),
            drop_policy=self._drop_policy,
            replicas=self.ready_replicas,
        )

    def _pump(self) -> None:
        self._pump_scheduled = False
        now = time.monotonic()
        self._note_readiness(now)
        while self.queue.rows:
            replica = binding.least_loaded(list(self.replicas.values()), self.plan.variant)
            if replica is None:
                break
            self._send_next(replica, now)
        for replica in self.replicas.values():
            if replica.takes_ahead and (head := self.queue.head()) is not None:
                rows = self.queue.rows_beside(head)
                if rows >= self.plan.batch_size and not head.attempts:
                    self._send_next(replica, now)
        self._drop_late(now)
        self._arm_timer(now)

    def _send_next(self, replica: Replica, now: float) -> None:
        variant = binding.variant_for(replica.ready_variants, self.plan.variant, self._variant) or self._variant
        formed = batching.form_batch(self.queue, now, self._terms(variant))
        for piece in formed.dropped:
            self._drop(piece.work, now)
        if formed.batch:
            self._typical_rows += TYPICAL_WEIGHT * (sum(piece.rows for piece in formed.batch) - self._typical_rows)
            slack_seconds = formed.batch[0].work.deadline - now - self.later_seconds()
            self._delivery.send(replica, variant, formed.batch, self.plan, slack_seconds)
        elif not replica.inflight:
            self._doubt_predictions(variant)

    def _doubt_predictions(self, variant: str) -> None:
        """All were dropped in front of an idle replica: were the predictions right?"""
        self._times.doubt(self._key(variant))
        for stage in self.followers:
            stage._doubt_predictions(stage.variant)  # noqa: SLF001 - the same class

    def _note_readiness(self, now: float) -> None:
        if self.ready_replicas:
            self.had_replica = True
            self._unready_since = None
            self._variant = self.variant
        elif self._unready_since is None:
            self._unready_since = now

    def _drop_late(self, now: float) -> None:
        """Drop what can no longer make it, without waiting for a replica to become free."""
        for piece in batching.drop_hopeless(self.queue, now, self._terms(self._variant)):
            self._drop(piece.work, now)
        while (head := self.queue.head()) is not None and self._grace_ends(head) <= now:
            self._drop(self.queue.pop().work, now)

    def _grace_ends(self, head: Slice) -> float:
        if self._unready_since is None:
            return float("inf")
        return max(self._unready_since, head.work.enqueued_at) + self._grace_seconds

    def _arm_timer(self, now: float) -> None:
        head = self.queue.head()
        if head is None:
            return
        due = min(batching.drop_time(head, self._terms(self._variant)), self._grace_ends(head))
        if due == float("inf") or (self._timer is not None and self._timer_due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = self._loop.call_later(max(due - now, 0) + 0.0005, self._timer_fired)

    def _timer_fired(self) -> None:
        self._timer, self._timer_due = None, float("inf")
        self._pump()

    def _drop(self, work: Work, now: float) -> None:
        if work.closed:
            return
        work.owner.work_refused(self._refusal_of(work, now))

    def _refusal_of(self, work: Work, now: float) -> Refusal:
        name, waited = self.stage.name, now - work.enqueued_at
        if self._unready_since is not None:
            return Refusal(
                Code.UNAVAILABLE,
                "NoReplica",
                f"stage {name}: no replica became ready while the request waited {waited:.3f} s",
                stage=name,
                retry_after_seconds=1.0,
            )
        if work.deadline <= now:
            message = f"dropped at stage {name}: its deadline passed after {waited:.3f} s in the queue"
            return Refusal(Code.DEADLINE_EXCEEDED, "Past", message, stage=name)
        return self._predicted_late(work, now, 0.0)

    def _predicted_late(self, work: Work, now: float, wait: float) -> Refusal:
        left = work.deadline - now
        service = self.service_seconds(min(work.rows, self.plan.batch_size))
        message = (
            f"dropped at stage {self.stage.name}: {left:.3f} s are left to its deadline, but it needs {wait:.3f} s "
            f"in the queue, {service:.3f} s in this stage and {self.later_seconds():.3f} s after it"
        )
        return Refusal(Code.DEADLINE_EXCEEDED, "Predicted", message, stage=self.stage.name)
