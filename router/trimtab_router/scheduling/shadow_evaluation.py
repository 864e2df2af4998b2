"""`ShadowEvaluation`: runs a small share of the rows at the best point too, and compares the responses.

A shadow row has no client and copied inputs, and is dispatched only while the queue is empty.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from trimtab_pipelines.stages import Stage
from trimtab_protocol.chat.engine_routes import ForwardedRequest
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk
from trimtab_protocol.tensors import Array
from trimtab_router.refusal import Refusal
from trimtab_router.scheduling.accuracy_monitor import AccuracyBaseline, AccuracyMonitor
from trimtab_router.scheduling.interfaces import Dispatcher, Feature
from trimtab_router.scheduling.latency_model import LatencyModel
from trimtab_router.scheduling.output_monitor import OutputMonitor
from trimtab_router.scheduling.policies.interface import Dispatch, Point
from trimtab_router.scheduling.replica_slots import Batch, BatchOutcome, Completed, ReplicaSlots
from trimtab_router.scheduling.service_time import Key
from trimtab_router.scheduling.stage_request import RowSlice, ServedRows, StageRequest
from trimtab_router.scheduling.winsorizer import Winsorizer

SHARE = 0.01  # of the rows
MAX_WAITING = 16
EXPIRY_SECONDS = 30.0


class ShadowSample:
    """A row that a point has served, to be served by the best point too."""

    trace_parent = ""
    request_id = ""
    has_listener = has_client = False
    forwarded: ForwardedRequest | None = None

    def __init__(
        self, stage: Stage, accuracy_monitor: AccuracyMonitor, key: Key, task: str, row: Mapping[str, Array], now: float
    ) -> None:
        self._stage, self._accuracy_monitor, self._row, self._now = stage, accuracy_monitor, row, now
        self._key, self._task = key, task

    def on_chunk(self, request: StageRequest, row: int, row_slice: Chunk | LastChunk, now: float) -> None: ...

    def on_rows_completed(self, request: StageRequest, start: int, outputs: Mapping[str, Array]) -> None: ...

    def on_completed(self, request: StageRequest, outputs: Mapping[str, Array], served: Sequence[ServedRows]) -> None:
        """Compare the responses; the best point has also served one more row."""
        label, confidence_output = self._stage.class_output, self._stage.confidence
        if label is None or confidence_output is None:
            return
        best: Key = (served[0].variant, served[0].operating_point)
        shift = request.confidence_shift
        self._accuracy_monitor.observe(best, self._task, outputs[confidence_output], self._now, shift=shift)
        agrees = bool(np.array_equal(outputs[label][0], self._row[label][0]))
        confidence, best_confidence = float(self._row[confidence_output][0]), float(outputs[confidence_output][0])
        self._accuracy_monitor.observe_shadow(
            self._key, best, self._task, confidence, best_confidence, agrees=agrees, shift=shift
        )

    def on_refused(self, refusal: Refusal) -> None: ...

    def on_embeddings_lost(self, request: StageRequest, *, counts: bool) -> None: ...


class ShadowEvaluation(Feature):
    """Sampling of shadow rows of one stage."""

    def __init__(
        self,
        stage: Stage,
        accuracy_monitor: AccuracyMonitor,
        output_monitor: OutputMonitor,
        latency_model: LatencyModel,
    ) -> None:
        self._stage, self._accuracy_monitor, self._latency_model = stage, accuracy_monitor, latency_model
        self._output_monitor = output_monitor
        self._label = stage.class_output if stage.confidence is not None and stage.retryable else None
        self._share_due = 0.0
        self._request_rows = Winsorizer()
        self._waiting: deque[tuple[float, StageRequest]] = deque(maxlen=MAX_WAITING)
        """Samples with the time at which they expire."""

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def on_batch_end(self, batch: Batch, outcome: BatchOutcome, now: float) -> None:
        confidence = self._stage.confidence
        if confidence is None or not isinstance(outcome, Completed) or outcome.point != batch.point.name:
            return
        best = self._best_point(batch.variant, batch.replica)
        if best.key == batch.key and not self._accuracy_monitor.enabled:
            return
        for row_slice, outputs in zip(batch.row_slices, outcome.outputs, strict=True):
            if row_slice.request.closed or isinstance(row_slice.request.owner, ShadowSample):
                continue
            task, weight = row_slice.request.options.task, self._row_weight(row_slice)
            if row_slice.provisional_response is not None:
                if (first_response := _baseline(self._stage, batch.key, row_slice)) is not None:
                    self._accuracy_monitor.observe_escalated(
                        batch.key, task, outputs[confidence], first_response, now, weight=weight
                    )
                continue
            shift = row_slice.request.confidence_shift
            self._accuracy_monitor.observe(batch.key, task, outputs[confidence], now, weight=weight, shift=shift)
            if self._label is not None and self._accuracy_monitor.enabled:
                self._output_monitor.observe(batch.key, outputs[self._label], weight)
            if self._label is None or best.key == batch.key or not self._is_comparable(batch, best, task):
                continue
            self._share_due += SHARE * weight * row_slice.rows
            if self._share_due >= 1.0 and (best.inputs is None or best.inputs <= row_slice.request.inputs.keys()):
                self._share_due %= 1.0
                self._add_sample(batch, row_slice, outputs, now)

    def _row_weight(self, row_slice: RowSlice) -> float:
        """Return the weight of each row: a request of exceptionally many rows counts as a usual one."""
        rows = row_slice.request.rows
        if row_slice.start == 0 and row_slice.provisional_response is None:
            self._request_rows.clip(rows)
        return min(self._request_rows.limit / rows, 1.0)

    def on_idle(self, dispatcher: Dispatcher, now: float) -> None:
        if not self._waiting:
            return
        replica = dispatcher.replica_selection.free_replica(dispatcher.replicas, dispatcher.variant)
        if replica is None:
            return
        row_slices = self._next_batch(now, self._latency_model.max_batch_rows(dispatcher.variant))
        if row_slices:
            variant = dispatcher.replica_selection.variant_for(replica, dispatcher.variant) or dispatcher.variant
            dispatcher.dispatch(replica, Dispatch(self._best_point(variant, replica), row_slices), now)

    def _best_point(self, variant: str, replica: ReplicaSlots) -> Point:
        points = self._latency_model.points(variant, ready=replica.ready_variants)
        return points[0] if len(points) == 1 else max(points, key=lambda point: point.accuracy)

    def _is_comparable(self, batch: Batch, best: Point, task: str) -> bool:
        return self._accuracy_monitor.has_baseline(batch.key, task) and self._accuracy_monitor.has_baseline(
            best.key, task
        )

    def _add_sample(self, batch: Batch, row_slice: RowSlice, outputs: Mapping[str, Array], now: float) -> None:
        row = row_slice.rows // 2
        response = {name: array[row : row + 1].copy() for name, array in outputs.items()}
        sample = ShadowSample(
            self._stage, self._accuracy_monitor, batch.key, row_slice.request.options.task, response, now
        )
        inputs = {name: row_slice.array(name)[row : row + 1].copy() for name in row_slice.request.inputs}
        request = StageRequest(sample, self._stage.name, 1, inputs, deadline=now + EXPIRY_SECONDS, now=now)
        request.task, request.confidence_shift = row_slice.request.task, row_slice.request.confidence_shift
        self._waiting.append((now + EXPIRY_SECONDS, request))

    def _next_batch(self, now: float, most_rows: int) -> list[RowSlice]:
        while self._waiting and self._waiting[0][0] <= now:
            self._waiting.popleft()
        row_slices: list[RowSlice] = []
        while self._waiting and len(row_slices) < most_rows:
            request = self._waiting[0][1]
            if row_slices and request.signature != row_slices[0].request.signature:
                break
            self._waiting.popleft()
            row_slices.append(RowSlice(request, 0, 1))
        return row_slices


def _baseline(stage: Stage, point: Key, row_slice: RowSlice) -> AccuracyBaseline | None:
    """Return the first pass of escalated rows; None if the document has no profiled gain of the escalation."""
    first_response, rule, task = row_slice.provisional_response, row_slice.escalation, row_slice.request.options.task
    if first_response is None or first_response.confidences is None or rule is None or rule.target != point:
        return None
    first = stage.variant(first_response.variant).point(first_response.operating_point)
    for escalation in first.escalations:
        outputs = escalation.by_task.get(task) if escalation.by_task else escalation
        if (
            escalation.target(first_response.variant) == point
            and outputs is not None
            and outputs.confidence_below == rule.confidence_below
            and outputs.share
        ):
            won = (outputs.accuracy - first.measured_accuracy(task if escalation.by_task else "").value) / outputs.share
            return AccuracyBaseline((first_response.variant, first.name), first_response.confidences, won)
    return None
