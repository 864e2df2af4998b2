"""`BatchCompletion`: returns results to requests, retries row slices, or fails requests, by batch outcome.

No row slice is lost and none is completed twice, whatever happens to a replica. Rows that a lost replica held return to
the queue, and rows that break replicas run alone until the cause is known. A batch may therefore run more than once; a
stage that is not retryable repeats no batch that may have run.

Low-confidence rows of a batch with an escalation rule return to the queue with a provisional response, which stands if
no better one arrives.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise
from typing import assert_never

import numpy as np

from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.stages import EMBEDDINGS_INPUT, Stage
from trimtab_protocol.tensors import Array, encode_raw_array
from trimtab_router.refusal import Refusal, failure
from trimtab_router.scheduling.interfaces import Feature, StatsSink
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.replica_slots import (
    Batch,
    BatchFailed,
    BatchOutcome,
    Cancelled,
    Completed,
    NotReady,
    Rejected,
    ReplicaLost,
    StreamCut,
)
from trimtab_router.scheduling.stage_request import EscalationRule, RowSlice, ServedRows, Signature, StageRequest
from trimtab_router.scheduling.suspect_rows import Suspect, SuspectRows, Verdict

MAX_LOST_REPLICAS = 2
MAX_LOST_CONCURRENT = 4  # for replicas with concurrent generations, where the row at fault is unknown
MAX_FAILED_BATCHES = 3
_REJECTIONS = {404: "RouteNotServed", 413: "PayloadTooLarge"}


class BatchCompletion:
    """Completion of the batches of one stage."""

    def __init__(
        self,
        stage: Stage,
        queue: DeadlineQueue,
        stats: StatsSink,
        *,
        query_of_death: "QueryOfDeathDetector | None" = None,
        grace_seconds: float = 0.0,
    ) -> None:
        self.suspects = SuspectRows(grace_seconds)
        self._query_of_death = query_of_death
        self._stage = stage
        self._inputs = len(stage.inputs)
        self.retryable = stage.retryable
        self._queue = queue
        self._stats = stats
        self._points = {(variant.name, point.name): point for variant in stage.variants for point in variant.points}
        self._counted_by = {output.name: output.counted_by for output in stage.outputs if output.counted_by is not None}

    def settle(  # noqa: C901 - one case for each ending
        self, batch: Batch, outcome: BatchOutcome, now: float
    ) -> None:
        if isinstance(outcome, Completed):
            self._complete(batch, outcome, now)
            return
        for row_slice in batch.row_slices:
            batch.note_expected_correct(row_slice, -1)
            if not row_slice.request.owner.has_client:
                row_slice.request.close()  # a retry would compete with rows of clients
        match outcome:
            case ReplicaLost():
                self._retry_lost(batch, outcome, now)
            case NotReady():
                for row_slice in batch.row_slices:
                    self.retry(row_slice, "ReplicaNotReady", alone=row_slice.alone, attempts=0)
            case Rejected():
                self._isolate_rejected(batch, outcome)
            case BatchFailed():
                self._retry_failed(batch, outcome)
            case StreamCut():
                self._end_stream_cut(batch, outcome)
            case Cancelled():
                self._stats.count_cancelled_row()
            case _:
                assert_never(outcome)

    def _complete(self, batch: Batch, answer: Completed, now: float) -> None:
        seconds = now - batch.dispatched_at
        point = self.point_served(batch, answer)
        usual_accuracy = batch.point.accuracy if batch.point.name == point.name else point.accuracy
        for row_slice, outputs in zip(batch.row_slices, answer.outputs, strict=True):
            request = row_slice.request
            waited = batch.dispatched_at - request.enqueued_at
            if request.owner.has_client:
                self._stats.observe_queue_seconds(waited)
            if request.closed:
                continue
            is_usual = not request.options.task and row_slice.escalation is None and len(request.inputs) == self._inputs
            served = ServedRows(
                variant=batch.variant,
                operating_point=point.name,
                batch_rows=batch.rows,
                queue_seconds=waited,
                service_seconds=seconds,
                rows=row_slice.rows,
                accuracy=usual_accuracy if is_usual else self._accuracy(batch, point, row_slice),
                dispatched_at=batch.dispatched_at,
                confidences=outputs[self._stage.confidence] if self._stage.confidence else None,
                counted_by=self._counted_by,
                escalated=row_slice.provisional_response is not None,
            )
            if row_slice.provisional_response is not None:
                first = row_slice.provisional_response
                first_key = first.variant, first.operating_point
                self._stats.count_escalated_rows(first_key, (batch.variant, point.name), row_slice.rows)
            if batch.escalation is not None and served.confidences is not None and self.retryable:
                self._escalate(row_slice, outputs, served, batch, batch.escalation)
            else:
                request.add_result(row_slice.start, row_slice.rows, outputs, served)

    def _accuracy(self, batch: Batch, point: OperatingPoint, row_slice: RowSlice) -> float:
        """Return the expected accuracy of these rows, for their task; of escalated rows, that of the escalation.

        Rows that lack an input of the point have the accuracy of the point that reads only what they have.
        """
        if (
            row_slice.escalation is not None
            and row_slice.escalation.accuracy is not None
            and row_slice.escalation.target == (batch.variant, point.name)
        ):
            return row_slice.escalation.accuracy
        task = row_slice.request.options.task
        if len(row_slice.request.inputs) < self._inputs:
            less = self._stage.point_for_inputs(batch.variant, point.name, row_slice.request.inputs)
            if less is not None:
                return less.measured_accuracy(task).value
        return batch.point.accuracy_for(task) if batch.point.name == point.name else point.accuracy

    def _escalate(
        self,
        row_slice: RowSlice,
        outputs: Mapping[str, Array],
        served: ServedRows,
        batch: Batch,
        batch_rule: EscalationRule,
    ) -> None:
        """Complete confident rows and queue the others."""
        task = row_slice.request.options.task
        rule, before = batch_rule.for_task(task), batch.point.accuracy_for(task)
        confidences = np.asarray(served.confidences)
        low_confidence = ~(confidences >= rule.confidence_below)  # NaN counts as low confidence
        if row_slice.request.owner.has_client:
            low_rows = int(low_confidence.sum())
            self._stats.count_low_confidence(batch.key, batch_rule.confidence_below, low_confidence.size, low_rows)
        high_accuracy, low_accuracy = rule.accuracies(served.accuracy, float(low_confidence.mean()))
        if rule.share is not None:  # the share says nothing about a single row
            low_accuracy = rule.low_confidence_accuracy(served.accuracy)
        for start, stop, escalate in _runs_of_equal(low_confidence):
            part = served.slice_outputs(outputs, start, stop)
            record = replace(
                served,
                rows=stop - start,
                confidences=confidences[start:stop],
                escalation_pending=escalate,
                accuracy=low_accuracy if escalate else high_accuracy,
            )
            first, last = row_slice.start + start, row_slice.start + stop
            row_slice.request.add_result(first, stop - start, part, record)
            if escalate and not row_slice.request.closed:
                provisional = replace(record, accuracy=rule.low_confidence_accuracy(before))
                self._queue.push(
                    RowSlice(row_slice.request, first, last, provisional_response=provisional, escalation=rule)
                )

    def point_served(self, batch: Batch, answer: Completed) -> OperatingPoint:
        return self._points.get((batch.variant, answer.point)) or self._points[batch.key]

    def _retry_lost(self, batch: Batch, lost: ReplicaLost, now: float) -> None:
        """Retry. Only the batch that the replica computed is suspected, not a prefetched or undelivered one."""
        self._stats.record_replica_error(f"{lost.message}; it held a batch of {len(batch.row_slices)} slices")
        suspected = lost.delivered and batch.is_computing
        for row_slice in batch.row_slices:
            if lost.delivered and not self.retryable:
                self.fail_not_retryable(row_slice, lost.message)
            elif suspected and row_slice.attempts + 1 >= MAX_LOST_REPLICAS:
                attempts = row_slice.attempts + 1
                self.fail(row_slice, f"{attempts} replicas were lost while they served it; the last: {lost.message}")
            elif lost.delivered and batch.replica.capacity and row_slice.attempts + 1 >= MAX_LOST_CONCURRENT:
                self.fail(
                    row_slice,
                    f"{row_slice.attempts + 1} replicas were lost while they served it; the last: {lost.message}",
                )
            elif lost.disconnected and (suspected or (lost.delivered and batch.replica.capacity)):
                self.suspects.hold(row_slice, batch, now)
            elif suspected:
                self.retry(row_slice, "ReplicaLost", alone=True)
            else:
                counted = int(lost.delivered and batch.replica.capacity > 0)
                self.retry(row_slice, "ReplicaLost", alone=row_slice.alone, attempts=counted)

    def retry_suspects(self, spare_replicas: int, now: float) -> None:
        for suspect, verdict in self.suspects.judge(spare_replicas, now):
            row_slice = suspect.row_slice
            match verdict:
                case Verdict.RETRY:
                    self.retry(row_slice, "ReplicaLost", alone=row_slice.alone, attempts=0)
                case Verdict.RETRY_ALONE:
                    self.retry(row_slice, "ReplicaLost", alone=True)
                case Verdict.FAIL:
                    if self._query_of_death is not None:
                        self._query_of_death.add(row_slice.request, now)
                    message = f"replica {suspect.replica} ended while it computed these rows alone"
                    self._end(
                        row_slice, "ModelServerError", "its model server ended as it computed these rows", message
                    )
                case Verdict.GIVE_UP:
                    self._give_up(suspect)
                case _:
                    assert_never(verdict)

    def _give_up(self, suspect: Suspect) -> None:
        row_slice, name = suspect.row_slice, self._stage.name
        if row_slice.provisional_response is not None:
            row_slice.request.accept_provisional(row_slice.start, row_slice.stop)
            return
        message = (
            f"stage {name}: a model server ended while it computed these rows, which may be the cause; they are not "
            "risked on the last replica, and no other one became ready in time"
        )
        row_slice.request.owner.on_refused(Refusal("NoReplica", message, stage=name))

    def _end_stream_cut(self, batch: Batch, cut: StreamCut) -> None:
        """Fail requests whose client has received tokens; restart the others."""
        self._stats.record_replica_error(cut.message)
        for row_slice in batch.row_slices:
            if row_slice.request.owner.has_listener:
                self._end(row_slice, "AnswerCut", "its model server was lost in the middle of the answer", cut.message)
            elif not self.retryable:
                self.fail_not_retryable(row_slice, cut.message)
            elif row_slice.attempts + 1 >= MAX_FAILED_BATCHES:
                self.fail(row_slice, cut.message)
            else:  # its first token was in time, so only the completion deadline counts
                self._queue.postpone(row_slice.request, row_slice.request.completion_deadline)
                self.retry(row_slice, "AnswerCut", alone=row_slice.alone)

    def _isolate_rejected(self, batch: Batch, rejected: Rejected) -> None:
        if len(batch.row_slices) > 1:
            for row_slice in batch.row_slices:
                self.retry(row_slice, "QueryOfDeath", alone=True, attempts=0)
            return
        row_slice = batch.row_slices[0]
        if row_slice.provisional_response is not None:
            row_slice.request.accept_provisional(row_slice.start, row_slice.stop)
        elif not row_slice.request.closed:
            message = f"stage {self._stage.name}: {rejected.message}"
            reason = _REJECTIONS.get(rejected.code, "InvalidArgument")
            row_slice.request.owner.on_refused(Refusal(reason, message))

    def _retry_failed(self, batch: Batch, broken: BatchFailed) -> None:
        self._stats.record_replica_error(broken.message)
        for row_slice in batch.row_slices:
            if broken.retryable and not self.retryable:
                self.fail_not_retryable(row_slice, broken.message)
            elif not broken.retryable or row_slice.attempts + 1 >= MAX_FAILED_BATCHES:
                self.fail(row_slice, broken.message)
            else:
                self.retry(row_slice, "ModelServerError", alone=True, failed_on=batch.replica.name)

    def retry(self, row_slice: RowSlice, reason: str, *, alone: bool, attempts: int = 1, failed_on: str = "") -> None:
        """Return a slice to the queue; one with embeddings needs new ones, since they are pulled once."""
        if not row_slice.request.closed:
            self._stats.count_retry(reason)
            if EMBEDDINGS_INPUT in row_slice.request.inputs:
                row_slice.request.owner.on_embeddings_lost(row_slice.request, counts=attempts > 0)
                return
            attempts += row_slice.attempts
            self._queue.push(replace(row_slice, attempts=attempts, alone=alone, failed_on=failed_on))

    def fail(self, row_slice: RowSlice, message: str) -> None:
        self._end(row_slice, "ModelServerError", "its model server failed", message)

    def fail_not_retryable(self, row_slice: RowSlice, message: str) -> None:
        what = "its model server failed, maybe after it ran; the stage is not repeatable"
        self._end(row_slice, "NotRepeatable", what, message)

    def _end(self, row_slice: RowSlice, reason: str, what: str, message: str) -> None:
        if row_slice.provisional_response is not None:
            row_slice.request.accept_provisional(row_slice.start, row_slice.stop)
        elif not row_slice.request.closed:
            name, owner = self._stage.name, row_slice.request.owner
            self._stats.record_request_error(owner.request_id, message)
            owner.on_refused(failure(reason, f"stage {name}: {what}", owner.request_id, stage=name))


def _runs_of_equal(low_confidence: Array) -> Iterator[tuple[int, int, bool]]:
    edges = [0, *(np.flatnonzero(np.diff(low_confidence)) + 1).tolist(), len(low_confidence)]
    return ((start, stop, bool(low_confidence[start])) for start, stop in pairwise(edges))


MAX_SUSPECTS = 256
REFUSED_SECONDS = 600.0
MAX_DIGESTED_BYTES = 2**20  # of each tensor, from its beginning, so that hashing does not block the event loop

_Size = tuple[str, int, Signature]


class QueryOfDeathDetector(Feature):
    """Digests of rows that cost replicas, by stage. Only a request of a suspect's size is digested, to save time."""

    def __init__(self, max_suspects: int = MAX_SUSPECTS, refused_seconds: float = REFUSED_SECONDS) -> None:
        self._most = max_suspects
        self._refused_seconds = refused_seconds
        self._until: dict[bytes, tuple[float, _Size]] = {}
        self._sizes: Counter[_Size] = Counter()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, request: StageRequest, now: float) -> None:
        if request.closed:
            return
        self._forget(now)
        digest = _digest(request)
        self._remove(digest)
        while len(self._until) >= self._most:
            self._remove(next(iter(self._until)))
        size = _size(request)
        self._until[digest] = (now + self._refused_seconds, size)
        self._sizes[size] += 1

    def on_batch_end(self, batch: Batch, outcome: BatchOutcome, now: float) -> None:
        """Remember rows whose replicas were lost each time they computed them."""
        if isinstance(outcome, ReplicaLost) and outcome.delivered and batch.is_computing:
            for row_slice in batch.row_slices:
                if row_slice.attempts + 1 >= MAX_LOST_REPLICAS:
                    self.add(row_slice.request, now)

    def refusal_of(self, request: StageRequest, now: float) -> Refusal | None:
        if not self._sizes or _size(request) not in self._sizes:
            return None
        self._forget(now)
        until, _ = self._until.get(_digest(request), (now, None))
        if until <= now:
            return None
        return Refusal(
            "SuspectedQueryOfDeath",
            f"stage {request.stage}: replicas were lost each time they served these very rows; "
            f"they are not taken for another {until - now:.0f} s",
            stage=request.stage,
        )

    def _forget(self, now: float) -> None:
        while self._until:
            digest, (until, _) = next(iter(self._until.items()))
            if until > now:
                break
            self._remove(digest)

    def _remove(self, digest: bytes) -> None:
        entry = self._until.pop(digest, None)
        if entry is not None:
            self._sizes[entry[1]] -= 1
            if not self._sizes[entry[1]]:
                del self._sizes[entry[1]]


def _size(request: StageRequest) -> _Size:
    return request.stage, request.rows, request.signature


def _digest(request: StageRequest) -> bytes:
    digest = blake2b(request.stage.encode(), digest_size=16)
    for name in sorted(request.inputs):
        digest.update(name.encode() + b"\0")
        digest.update(memoryview(encode_raw_array(request.inputs[name]))[:MAX_DIGESTED_BYTES])
    return digest.digest()
