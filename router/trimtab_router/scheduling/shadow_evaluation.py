"""A small share of the rows is answered by the best point as well, when there is room, and the answers are compared.

Such rows are works of their own, whose inputs are copies and whose owner is the audit: nobody waits for them, and they
never leave while anybody else's rows wait. Pure.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from trimtab_pipelines.stages import Stage
from trimtab_pipelines.variants import Variant
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk
from trimtab_protocol.tensors import Array
from trimtab_router.refusal import Refusal
from trimtab_router.request.graph import ReadyStage
from trimtab_router.scheduling.accuracy_monitor import AccuracyBaseline, AccuracyMonitor
from trimtab_router.scheduling.batch_outcomes import Completed
from trimtab_router.scheduling.policies.interface import Point
from trimtab_router.scheduling.replica_slots import Batch
from trimtab_router.scheduling.service_time import Key
from trimtab_router.scheduling.stage_request import RowSlice, ServedRows, StageRequest

SHARE = 0.01
"""Of the rows."""
MOST_WAITING = 16
KEPT_SECONDS = 30.0


class ShadowSample:
    """One row, answered by a point, that the best one answers too."""

    trace_parent = ""
    request_id = ""
    has_listener = has_client = False

    def __init__(
        self, stage: Stage, watch: AccuracyMonitor, key: Key, task: str, row: Mapping[str, Array], now: float
    ) -> None:
        self._stage, self._watch, self._row, self._now = stage, watch, row, now
        self._key, self._task = key, task

    def on_chunk(self, request: StageRequest, row: int, row_slice: Chunk | LastChunk, now: float) -> None:
        """Answers that are written are not compared."""

    def on_rows_completed(self, request: StageRequest, start: int, outputs: Mapping[str, Array]) -> None:
        """Wait for the others."""

    def on_completed(self, request: StageRequest, outputs: Mapping[str, Array], served: Sequence[ServedRows]) -> None:  # noqa: ARG002 - of an owner
        """Compare; the best point has seen one more row, too."""
        label, confidence = comparable_output(self._stage), self._stage.confidence
        if label is None or confidence is None:
            return
        best = (served[0].variant, served[0].operating_point)
        self._watch.observe(best, self._task, outputs[confidence], self._now)
        agrees = bool(np.array_equal(outputs[label][0], self._row[label][0]))
        sure, best_sure = float(self._row[confidence][0]), float(outputs[confidence][0])
        self._watch.observe_shadow(self._key, best[1], self._task, sure, best_sure, agrees=agrees)

    def on_refused(self, refusal: Refusal) -> None:
        """Nobody waits for it."""

    def on_embeddings_lost(self, request: StageRequest, *, counts: bool) -> None:
        """A stage that is told of confidences pulls nothing."""


class ShadowEvaluation:
    """Which rows of a stage are answered again, and those that wait for room.

    Args:
        stage: the stage.
        watch: is told how answers compare.
    """

    def __init__(self, stage: Stage, watch: AccuracyMonitor) -> None:
        self._stage, self._watch = stage, watch
        self._label = comparable_output(stage) if stage.confidence is not None and stage.retryable else None
        self._owed = 0.0
        self.waiting: deque[tuple[float, StageRequest]] = deque(maxlen=MOST_WAITING)
        """For room: until when, and which."""

    def observe_batch(self, batch: Batch, answer: Completed, points: Sequence[Point], now: float) -> None:
        """Learn from a batch, and pick rows of it; call it before its members get their rows."""
        confidence = self._stage.confidence
        if confidence is None or answer.point != batch.point.name:
            return
        variant = self._stage.variant(batch.variant)
        best = max(points, key=lambda point: point.accuracy)
        for row_slice, own in zip(batch.row_slices, answer.outputs, strict=True):
            if row_slice.request.closed or isinstance(row_slice.request.owner, ShadowSample):
                continue
            task = row_slice.request.options.task
            if row_slice.provisional_response is not None:
                if (before := _before(variant, batch.point.name, row_slice)) is not None:
                    self._watch.observe_escalated(batch.key, task, own[confidence], before, now)
                continue
            self._watch.observe(batch.key, task, own[confidence], now)
            if self._label is None or best.name == batch.point.name or not self._tells(batch, best, task):
                continue
            self._owed += SHARE * row_slice.rows
            if self._owed >= 1.0 and (best.inputs is None or best.inputs <= row_slice.request.inputs.keys()):
                self._owed %= 1.0
                self._pick(batch, row_slice, own, now)

    def _tells(self, batch: Batch, best: Point, task: str) -> bool:
        """Whether a comparison would say anything: of both points it was measured how certain they are."""
        return self._watch.has_baseline(batch.key, task) and self._watch.has_baseline((batch.variant, best.name), task)

    def _pick(self, batch: Batch, row_slice: RowSlice, own: Mapping[str, Array], now: float) -> None:
        row = row_slice.rows // 2
        answered = {name: array[row : row + 1].copy() for name, array in own.items()}
        audit = ShadowSample(self._stage, self._watch, batch.key, row_slice.request.options.task, answered, now)
        inputs = {name: row_slice.array(name)[row : row + 1].copy() for name in row_slice.request.inputs}
        runnable = ReadyStage(self._stage.name, 1, inputs)
        request = StageRequest(audit, runnable, deadline=now + KEPT_SECONDS, now=now)
        request.task = row_slice.request.task
        self.waiting.append((now + KEPT_SECONDS, request))

    def next_batch(self, now: float, most_rows: int) -> list[RowSlice]:
        """Rows of one batch that may leave now that nobody waits, oldest first; those of one shape."""
        while self.waiting and self.waiting[0][0] <= now:
            self.waiting.popleft()
        taken: list[RowSlice] = []
        while self.waiting and len(taken) < most_rows:
            request = self.waiting[0][1]
            if taken and request.signature != taken[0].request.signature:
                break
            self.waiting.popleft()
            taken.append(RowSlice(request, 0, 1))
        return taken


def _before(variant: Variant, point: str, row_slice: RowSlice) -> AccuracyBaseline | None:
    """The first look at rows that a point sees again; None where the document does not tell what such a look wins."""
    before, meant, task = row_slice.provisional_response, row_slice.escalation, row_slice.request.options.task
    if before is None or before.confidences is None or meant is None or meant.to != point:
        return None
    first = variant.point(before.operating_point)
    for look in first.escalations:
        own = look.by_task.get(task) if look.by_task else look
        if look.to == point and own is not None and own.confidence_below == meant.confidence_below and own.share:
            won = (own.accuracy - first.measured_accuracy(task if look.by_task else "").value) / own.share
            return AccuracyBaseline(first.name, before.confidences, won)
    return None


def comparable_output(stage: Stage) -> str | None:
    """The output that answers can be compared by: the first whole number a row has; None where there is none."""
    whole = (o.name for o in stage.outputs if o.datatype.startswith(("INT", "UINT", "BOOL")) and o.counted_by is None)
    return next(whole, None)
