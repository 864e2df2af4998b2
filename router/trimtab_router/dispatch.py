"""Late binding: a batch is formed in the moment a replica is free for it, and never waits in front of a busy one.

One dispatcher a stage. It owns the stage's queue, follows plan and replicas, and gives back to each request its own
rows, or the reason why not. What it decides by (queue, batching, binding, policies) is pure; here is only the doing.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping, Sequence

from trimtab_pipelines.plan import StagePlan
from trimtab_pipelines.spec import OperatingPoint, Stage
from trimtab_protocol import InferResponse, ProtocolError, Tensor
from trimtab_protocol.tensors import Array
from trimtab_router import batching, binding
from trimtab_router.metrics import StageMetrics
from trimtab_router.policies import BatchView, Policy
from trimtab_router.queue import DeadlineQueue
from trimtab_router.refusal import Code, Refusal, invalid
from trimtab_router.replicas import BatchRequest, Replica, ReplicaLost, ReplicaRefused
from trimtab_router.scatter import BrokenAnswer, scatter
from trimtab_router.service_time import Key, ServiceTimes
from trimtab_router.work import Served, Slice, Work

log = logging.getLogger(__name__)

MAX_LOST_REPLICAS = 5
MAX_BROKEN_ANSWERS = 3
ALONE_FROM_ATTEMPT = 2
CALLERS_FAULT = frozenset({400, 413, 422})
NOT_READY = frozenset({404, 429, 503})
HANG_FACTOR = 20.0
MIN_HANG_SECONDS = 10.0
FIRST_BATCH_HANG_SECONDS = 60.0
MAX_REQUEST_IDS = 16
TYPICAL_WEIGHT = 0.1
QUIET_TURNS = 8


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
        grace_seconds: how long rows are held while no replica is ready.
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
        grace_seconds: float,
    ) -> None:
        self.stage = stage
        self.plan = plan
        self.queue = queue
        self.times = ServiceTimes()
        self.replicas: dict[str, Replica] = {}
        self._datatypes = datatypes
        self._policy = policy
        self._drop_policy = drop_policy
        self.followers: tuple[Dispatcher, ...] = ()
        self._typical_rows = 1.0
        self.metrics = metrics
        self._grace_seconds = grace_seconds
        self._loop = asyncio.get_running_loop()
        self._variant = plan.variant
        self._uses = itertools.count(1)
        self._unready_since: float | None = time.monotonic()
        self._pump_scheduled = False
        self._arrivals = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = float("inf")
        self._batches: set[asyncio.Task[None]] = set()
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
        return self.times.predict(self._key(self._variant), rows)

    def later_seconds(self) -> float:
        """Predicted seconds of the stages after this one, along the longest path and without queueing."""
        return max((stage.typical_seconds() + stage.later_seconds() for stage in self.followers), default=0.0)

    def typical_seconds(self) -> float:
        """Predicted seconds of a batch as they have been lately."""
        return self.service_seconds(round(self._typical_rows))

    def follow(self, plan: StagePlan) -> None:
        """Take a new plan: batch size and operating point from the next batch on, the variant once it is ready."""
        self.plan = plan
        self.times.set_profile((plan.variant, plan.operating_point), plan.service_seconds)
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

    def expected_wait_seconds(self) -> float:
        """How long rows that join the end of the queue now will wait for their departure."""
        batches = self.queue.rows // max(self.plan.batch_size, 1)
        return batches * self.service_seconds(self.plan.batch_size) / max(self.ready_replicas, 1)

    def hopeless_at_the_door(self, work: Work, now: float) -> Refusal | None:
        """Why this work would only be dropped later if it joined the end of the queue; None where it may make it.

        Waiting in vain would cost the caller time and the queue its room. Rows more urgent than others overtake them,
        so only those that would come last are judged.
        """
        judged = self._drop_policy == "Predicted" and self._unready_since is None
        if not judged or not self.queue.rows or work.deadline < self.queue.latest_pushed:
            return None
        wait = self.expected_wait_seconds()
        service = self.service_seconds(min(work.rows, self.plan.batch_size))
        if now + wait + service + self.later_seconds() <= work.deadline:
            return None
        return self._predicted_late(work, now, wait)

    @property
    def service_ratio(self) -> float:
        """Observed over profiled service time of what runs now."""
        return self.times.ratio(self._key(self.variant))

    def _key(self, variant: str) -> Key:
        if variant == self.plan.variant:
            return variant, self.plan.operating_point
        return variant, self.stage.variant(variant).points[0].name

    def _terms(self, variant: str) -> batching.Terms:
        key = self._key(variant)
        return batching.Terms(
            max_rows=min(self.plan.batch_size, self.stage.variant(variant).max_batch_size),
            service_seconds=lambda rows: self.times.predict(key, rows),
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
            variant = binding.variant_for(replica.ready_variants, self.plan.variant, self._variant) or self._variant
            formed = batching.form_batch(self.queue, now, self._terms(variant))
            for piece in formed.dropped:
                self._drop(piece.work, now)
            if formed.batch:
                self._send(replica, variant, formed.batch, now)
            else:
                self._doubt_predictions(variant)
        self._drop_late(now)
        self._arm_timer(now)

    def _doubt_predictions(self, variant: str) -> None:
        """All were dropped in front of an idle replica: were the predictions right?"""
        self.times.doubt(self._key(variant))
        for stage in self.followers:
            stage._doubt_predictions(stage.variant)  # noqa: SLF001 - the same class

    def _note_readiness(self, now: float) -> None:
        if self.ready_replicas:
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

    def _send(self, replica: Replica, variant: str, batch: list[Slice], now: float) -> None:
        replica.take(next(self._uses))
        rows = sum(piece.rows for piece in batch)
        self._typical_rows += TYPICAL_WEIGHT * (rows - self._typical_rows)
        point = self._choose_point(variant, batch, rows, now)
        request = self._request(variant, point, batch, rows)
        task = self._loop.create_task(self._serve(replica, request, batch, now))
        self._batches.add(task)
        task.add_done_callback(self._batches.discard)

    async def _serve(self, replica: Replica, request: BatchRequest, batch: list[Slice], now: float) -> None:
        departed_unix_nanoseconds = time.time_ns()
        try:
            answer = await replica.infer(request)
            outputs = scatter(self.stage, answer.outputs, [piece.rows for piece in batch])
            self._hand_out(request, answer, list(zip(batch, outputs, strict=True)), now, departed_unix_nanoseconds)
        except ReplicaLost as error:
            replica.doubt()
            self._retry_lost(batch, str(error))
        except ReplicaRefused as error:
            self._retry_refused(replica, batch, error)
        except (BrokenAnswer, ProtocolError) as error:
            self._retry_broken(batch, f"model server {replica.name}: {error}")
        except Exception as error:
            log.exception("stage %s: a batch of %d slices failed", self.stage.name, len(batch))
            for piece in batch:
                self._fail(piece, f"{type(error).__name__}: {error}")
        finally:
            replica.release()
            self.wake()

    def _hand_out(
        self,
        request: BatchRequest,
        answer: InferResponse,
        members: Sequence[tuple[Slice, Mapping[str, Array]]],
        departed: float,
        departed_unix_nanoseconds: int,
    ) -> None:
        """Learn from a batch that was served, and give every member its rows."""
        seconds = time.monotonic() - departed
        rows = sum(piece.rows for piece, _ in members)
        key = request.variant, str(request.parameters["operating_point"])
        self.times.observe(key, rows, seconds)
        self.metrics.served(request.variant, rows, seconds, self.times.ratio(key))
        point = self._point_served(request, answer)
        for piece, outputs in members:
            waited = departed - piece.work.enqueued_at
            self.metrics.queue_seconds.observe(waited)
            served = Served(
                variant=request.variant,
                operating_point=point.name,
                batch_rows=rows,
                queue_seconds=waited,
                service_seconds=seconds,
                accuracy=point.accuracy,
                departed_unix_nanoseconds=departed_unix_nanoseconds,
            )
            piece.work.add_piece(piece.start, piece.rows, outputs, served)

    def _point_served(self, request: BatchRequest, answer: InferResponse) -> OperatingPoint:
        """The operating point the model server says it ran, else the one that was asked for."""
        asked = str(request.parameters["operating_point"])
        points = {point.name: point for point in self.stage.variant(request.variant).points}
        named = str(answer.parameters.get("operating_point", asked))
        return points[named] if named in points else points[asked]

    def _choose_point(self, variant: str, batch: Sequence[Slice], rows: int, now: float) -> str:
        if variant != self.plan.variant:
            return self.stage.variant(variant).points[0].name
        view = BatchView(
            rows=rows,
            slack_seconds=min(piece.work.deadline for piece in batch) - now - self.later_seconds(),
            planned_point=self.plan.operating_point,
            fallback_points=self.plan.fallback_operating_points,
            predict_seconds=lambda point: self.times.predict((variant, point), rows),
        )
        return self._policy(view)

    def _request(self, variant: str, point: str, batch: Sequence[Slice], rows: int) -> BatchRequest:
        inputs = [
            [Tensor(name, self._datatypes[name], piece.array(name)) for piece in batch] for name in batch[0].work.inputs
        ]
        predicted = self.times.predict((variant, point), rows)
        hang_seconds = max(HANG_FACTOR * predicted, MIN_HANG_SECONDS) if predicted else FIRST_BATCH_HANG_SECONDS
        return BatchRequest(variant, inputs, {"operating_point": point}, _pass_on(batch), hang_seconds)

    def _retry_lost(self, batch: Sequence[Slice], message: str) -> None:
        log.warning("stage %s: %s; its batch is sent again", self.stage.name, message)
        for piece in batch:
            if piece.attempts + 1 >= MAX_LOST_REPLICAS:
                self._fail(piece, f"{piece.attempts + 1} replicas were lost while they served it; the last: {message}")
            else:
                self._return(piece, "ReplicaLost", alone=piece.attempts + 1 >= ALONE_FROM_ATTEMPT)

    def _retry_refused(self, replica: Replica, batch: Sequence[Slice], error: ReplicaRefused) -> None:
        if error.status in NOT_READY:
            replica.doubt()
            for piece in batch:
                self._return(piece, "ReplicaNotReady", alone=piece.alone, attempts=0)
        elif error.status not in CALLERS_FAULT:
            self._retry_broken(batch, f"model server {replica.name} answered {error.status}: {error.message}")
        elif len(batch) == 1:
            piece = batch[0]
            if not piece.work.closed:
                piece.work.owner.work_refused(invalid(f"stage {self.stage.name}: {error.message}"))
        else:
            for piece in batch:
                self._return(piece, "CulpritSought", alone=True, attempts=0)

    def _retry_broken(self, batch: Sequence[Slice], message: str) -> None:
        log.warning("stage %s: %s", self.stage.name, message)
        for piece in batch:
            if piece.attempts + 1 >= MAX_BROKEN_ANSWERS:
                self._fail(piece, message)
            else:
                self._return(piece, "ModelServerError", alone=True)

    def _return(self, piece: Slice, reason: str, *, alone: bool, attempts: int = 1) -> None:
        """Put a slice back where it was by its deadline."""
        if not piece.work.closed:
            self.metrics.retried(reason)
            self.queue.push(Slice(piece.work, piece.start, piece.stop, piece.attempts + attempts, alone))

    def _fail(self, piece: Slice, message: str) -> None:
        if not piece.work.closed:
            refusal = Refusal(
                Code.INTERNAL, "ModelServerError", f"stage {self.stage.name}: {message}", stage=self.stage.name
            )
            piece.work.owner.work_refused(refusal)


def _pass_on(batch: Sequence[Slice]) -> dict[str, str]:
    """Trace headers for the model server: the first member's trace, everybody's request id."""
    headers: dict[str, str] = {}
    trace_parent = next((piece.work.owner.trace_parent for piece in batch if piece.work.owner.trace_parent), "")
    if trace_parent:
        headers["traceparent"] = trace_parent
    request_ids = [piece.work.owner.request_id for piece in batch if piece.work.owner.request_id]
    if request_ids:
        headers["x-request-id"] = ",".join(request_ids[:MAX_REQUEST_IDS])
    return headers
