"""Takes batches to replicas and brings back to each member its own rows, or what went wrong.

Whatever happens to a replica, no member is lost and none is answered twice: rows that were in its hands go back into
the queue, and rows that break replicas or answers travel alone until it is known whose fault it is. So a batch may run
more than once; a stage that says it is not repeatable gets none again that may have run.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trimtab_pipelines.plan import StagePlan
from trimtab_pipelines.spec import OperatingPoint, Stage
from trimtab_protocol import InferResponse, ProtocolError, Tensor
from trimtab_protocol.extensions import COMPUTE_SECONDS, OPERATING_POINT, WAITED_SECONDS
from trimtab_protocol.tensors import Array
from trimtab_protocol.text import told
from trimtab_router.binding import send_ahead_at
from trimtab_router.metrics import StageMetrics
from trimtab_router.policies import BatchView, Policy
from trimtab_router.queue import DeadlineQueue
from trimtab_router.refusal import failure, invalid
from trimtab_router.replicas import BatchRequest, Replica, ReplicaLost, ReplicaRefused
from trimtab_router.scatter import BrokenAnswer, most_answer_bytes, scatter
from trimtab_router.service_time import WEIGHT, Key, ServiceTimes, wait_for_others
from trimtab_router.suspects import Suspects
from trimtab_router.work import Served, Slice

log = logging.getLogger(__name__)

MAX_LOST_REPLICAS = 2
MAX_BROKEN_ANSWERS = 3
CALLERS_FAULT = frozenset({400, 413, 422})
NOT_READY = frozenset({404, 429, 503})
HANG_FACTOR = 20.0
FIRST_BATCH_FACTOR = 10.0
MAX_REQUEST_IDS = 16


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """A batch on its way; times are monotonic seconds, `departed_unix_nanoseconds` is for traces."""

    replica: Replica
    request: BatchRequest
    batch: Sequence[Slice]
    rows: int
    departed_at: float
    departed_unix_nanoseconds: int
    found_idle: bool

    @property
    def key(self) -> Key:
        """What it runs: variant and operating point."""
        return self.request.variant, str(self.request.parameters[OPERATING_POINT])


class Delivery:
    """Delivers the batches of one stage.

    Args:
        stage: the stage.
        datatypes: the datatype of each of its inputs.
        queue: where rows go back to.
        policy: chooses the operating point of each batch.
        metrics: of this stage.
        wake: called when a replica can take another batch or rows came back.
        suspects: remembers rows that cost replicas.
        hang_seconds: the least time after which a replica that does not answer counts as lost; the first batch, of
            which nothing is known yet, has ten times as long.
        max_answer_bytes: of an answer whose size the stage leaves open.
    """

    def __init__(  # noqa: PLR0913 - wired together in one place
        self,
        stage: Stage,
        *,
        datatypes: Mapping[str, str],
        queue: DeadlineQueue,
        policy: Policy,
        metrics: StageMetrics,
        wake: Callable[[], None],
        suspects: Suspects,
        hang_seconds: float,
        max_answer_bytes: int,
    ) -> None:
        self.times = ServiceTimes()
        self._stage = stage
        self._datatypes = datatypes
        self._queue = queue
        self._policy = policy
        self._metrics = metrics
        self._wake = wake
        self._suspects = suspects
        self._hang_seconds = hang_seconds
        self._max_answer_bytes = max_answer_bytes
        self._compute_times = ServiceTimes()
        self._uses = itertools.count(1)
        self._ahead: dict[Replica, Parcel] = {}
        self._computing: dict[Replica, Parcel] = {}
        """Which batch of a replica's it computes; one sent ahead only waits there."""
        self._under_way: set[asyncio.Task[None]] = set()

    def send(
        self, replica: Replica, variant: str, batch: Sequence[Slice], plan: StagePlan, slack_seconds: float
    ) -> None:
        """Let a batch leave for a replica; `slack_seconds` is what its most urgent member can spare in this stage."""
        rows = sum(piece.rows for piece in batch)
        point = self._choose_point(variant, rows, plan, slack_seconds)
        parcel = Parcel(
            replica=replica,
            request=self._request(variant, point, batch, rows),
            batch=batch,
            rows=rows,
            departed_at=time.monotonic(),
            departed_unix_nanoseconds=time.time_ns(),
            found_idle=replica.inflight == 0,
        )
        replica.take(next(self._uses))
        if parcel.found_idle:
            self._computing[replica] = parcel
            self._plan_ahead(parcel)
        else:
            self._ahead[replica] = parcel
        task = asyncio.get_running_loop().create_task(self._deliver(parcel))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    def _choose_point(self, variant: str, rows: int, plan: StagePlan, slack_seconds: float) -> str:
        if variant != plan.variant:
            return self._stage.variant(variant).points[0].name
        view = BatchView(
            rows=rows,
            slack_seconds=slack_seconds,
            planned_point=plan.operating_point,
            fallback_points=plan.fallback_operating_points,
            predict_seconds=lambda point: self.times.predict((variant, point), rows),
        )
        return self._policy(view)

    def _request(self, variant: str, point: str, batch: Sequence[Slice], rows: int) -> BatchRequest:
        inputs = [
            [Tensor(name, self._datatypes[name], piece.array(name)) for piece in batch] for name in batch[0].work.inputs
        ]
        predicted = self.times.predict((variant, point), rows)
        least = self._hang_seconds if predicted else FIRST_BATCH_FACTOR * self._hang_seconds
        timeout_seconds = max(HANG_FACTOR * predicted, least)
        return BatchRequest(
            id=secrets.token_hex(8),
            variant=variant,
            inputs=inputs,
            parameters={OPERATING_POINT: point},
            headers=_pass_on(batch),
            timeout_seconds=timeout_seconds,
            most_answer_bytes=most_answer_bytes(self._stage, rows, self._max_answer_bytes),
        )

    async def _deliver(self, parcel: Parcel) -> None:
        replica, batch = parcel.replica, parcel.batch
        try:
            answer = await replica.infer(parcel.request)
            outputs = scatter(self._stage, answer.outputs, [piece.rows for piece in batch])
            self._learn(parcel, answer)
            self._hand_out(parcel, answer, outputs)
        except ReplicaLost as error:
            replica.doubt()
            self._retry_lost(parcel, error)
        except ReplicaRefused as error:
            self._retry_refused(replica, batch, error)
        except (BrokenAnswer, ProtocolError) as error:
            self._retry_broken(batch, f"model server {replica.name}: {error}")
        except Exception as error:
            log.exception("stage %s: a batch of %d slices failed", self._stage.name, len(batch))
            for piece in batch:
                self._fail(piece, f"{type(error).__name__}: {error}")
        finally:
            replica.release(time.monotonic())
            self._compute_next(parcel)
            self._wake()

    def _compute_next(self, parcel: Parcel) -> None:
        replica = parcel.replica
        if self._computing.get(replica) is parcel:
            del self._computing[replica]
        follower = self._ahead.pop(replica, None)
        if follower is not None and follower is not parcel:
            if replica.ready_variants:  # else it is lost with the batch it waited for
                self._computing[replica] = follower
            self._plan_ahead(follower)

    def _learn(self, parcel: Parcel, answer: InferResponse) -> None:
        """How long it took, from when its replica had nothing else to do."""
        now = time.monotonic()
        replica, compute_seconds = parcel.replica, answer.parameters.get(COMPUTE_SECONDS)
        seconds = now - max(parcel.departed_at, replica.completed_at)
        others = self._wait_for_others(parcel, answer)
        self.times.observe_wait(others)
        self.times.observe(parcel.key, parcel.rows, max(seconds - others, 0.0))
        self._metrics.served(parcel.request.variant, parcel.rows, seconds, self.times.ratio(parcel.key))
        if isinstance(compute_seconds, float):
            self._compute_times.observe(parcel.key, parcel.rows, compute_seconds)
            if parcel.found_idle:
                transfer_seconds = max(seconds - others - compute_seconds, 0.0)
                replica.transfer_seconds += WEIGHT * (transfer_seconds - replica.transfer_seconds)

    def _wait_for_others(self, parcel: Parcel, answer: InferResponse) -> float:
        waited, replica = answer.parameters.get(WAITED_SECONDS), parcel.replica
        if not isinstance(waited, float):
            return 0.0
        return wait_for_others(waited, parcel.departed_at, replica.completed_at, replica.transfer_seconds)

    def _plan_ahead(self, parcel: Parcel) -> None:
        """Open the replica for a full batch just before it is free, unless it may not survive this one."""
        replica = parcel.replica
        if any(piece.attempts for piece in parcel.batch):
            return
        compute_seconds = self._compute_times.expect(parcel.key, parcel.rows)
        due = send_ahead_at(parcel.departed_at, replica.completed_at, compute_seconds, replica.transfer_seconds)
        if due < float("inf"):
            replica.open_ahead(due - time.monotonic(), self._wake)

    def _hand_out(self, parcel: Parcel, answer: InferResponse, outputs: Sequence[Mapping[str, Array]]) -> None:
        seconds = time.monotonic() - parcel.departed_at
        point = self._point_served(parcel, answer)
        for piece, own in zip(parcel.batch, outputs, strict=True):
            waited = parcel.departed_at - piece.work.enqueued_at
            self._metrics.queue_seconds.observe(waited)
            served = Served(
                variant=parcel.request.variant,
                operating_point=point.name,
                batch_rows=parcel.rows,
                queue_seconds=waited,
                service_seconds=seconds,
                accuracy=point.accuracy,
                departed_unix_nanoseconds=parcel.departed_unix_nanoseconds,
            )
            piece.work.add_piece(piece.start, piece.rows, own, served)

    def _point_served(self, parcel: Parcel, answer: InferResponse) -> OperatingPoint:
        """The operating point the model server says it ran, else the one that was asked for."""
        variant, asked = parcel.key
        points = {point.name: point for point in self._stage.variant(variant).points}
        return points.get(str(answer.parameters.get(OPERATING_POINT, asked)), points[asked])

    def _retry_lost(self, parcel: Parcel, error: ReplicaLost) -> None:
        """Only the batch that was computed is under suspicion: not one that waited behind it or never arrived."""
        log.warning("stage %s: %s; it held a batch of %d slices", self._stage.name, told(str(error)), len(parcel.batch))
        suspected = error.delivered and self._computing.get(parcel.replica) is parcel
        for piece in parcel.batch:
            if error.delivered and not self._stage.repeatable:
                self._fail_unrepeated(piece, str(error))
            elif suspected and piece.attempts + 1 >= MAX_LOST_REPLICAS:
                self._suspects.add(piece.work, time.monotonic())
                self._fail(piece, f"{piece.attempts + 1} replicas were lost while they served it; the last: {error}")
            elif suspected:
                self._return(piece, "ReplicaLost", alone=True)
            else:
                self._return(piece, "ReplicaLost", alone=piece.alone, attempts=0)

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
                piece.work.owner.work_refused(invalid(f"stage {self._stage.name}: {error.message}"))
        else:
            for piece in batch:
                self._return(piece, "CulpritSought", alone=True, attempts=0)

    def _retry_broken(self, batch: Sequence[Slice], message: str) -> None:
        log.warning("stage %s: %s", self._stage.name, told(message))
        for piece in batch:
            if not self._stage.repeatable:
                self._fail_unrepeated(piece, message)
            elif piece.attempts + 1 >= MAX_BROKEN_ANSWERS:
                self._fail(piece, message)
            else:
                self._return(piece, "ModelServerError", alone=True)

    def _return(self, piece: Slice, reason: str, *, alone: bool, attempts: int = 1) -> None:
        """Put a slice back where it was by its deadline."""
        if not piece.work.closed:
            self._metrics.retried(reason)
            self._queue.push(Slice(piece.work, piece.start, piece.stop, piece.attempts + attempts, alone))

    def _fail(self, piece: Slice, message: str) -> None:
        self._end(piece, "ModelServerError", "its model server failed", message)

    def _fail_unrepeated(self, piece: Slice, message: str) -> None:
        what = "its model server failed, maybe after it ran; the stage is not repeatable"
        self._end(piece, "NotRepeatable", what, message)

    def _end(self, piece: Slice, reason: str, what: str, message: str) -> None:
        if not piece.work.closed:
            name, owner = self._stage.name, piece.work.owner
            log.error("stage %s: request %r failed: %s", name, owner.request_id, told(message))
            owner.work_refused(failure(reason, f"stage {name}: {what}", owner.request_id, stage=name))


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
