"""What becomes of a batch that came back: each member gets its own rows, another try, or what went wrong.

Whatever happens to a replica, no member is lost and none is answered twice: rows that were in its hands go back into
the queue, and rows that break replicas or answers travel alone until it is known whose fault it is. So a batch may run
more than once; a stage that says it is not repeatable gets none again that may have run.

Of a batch whose least certain rows are to be looked at again, these go back with the answer they have, and keep it if
no better one comes. Pure.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import assert_never

import numpy as np

from trimtab_pipelines.error_codes import ErrorCode
from trimtab_pipelines.operating_point import OperatingPoint
from trimtab_pipelines.stages import EMBEDDINGS_INPUT, Stage
from trimtab_protocol.tensors import Array
from trimtab_router.refusal import failure, invalid, oversize
from trimtab_router.scheduling.batch_outcomes import (
    BatchFailed,
    Cancelled,
    Completed,
    Ending,
    NotReady,
    Rejected,
    ReplicaLost,
    StreamCut,
)
from trimtab_router.scheduling.interfaces import StatsSink
from trimtab_router.scheduling.query_of_death import QueryOfDeathDetector
from trimtab_router.scheduling.queue import DeadlineQueue
from trimtab_router.scheduling.replica_slots import Batch
from trimtab_router.scheduling.stage_request import EscalationRule, RowSlice, ServedRows

MAX_LOST_REPLICAS = 2
MAX_LOST_IN_COMPANY = 4
"""Of replicas that write for many side by side: who of them is to blame is not known."""
MAX_BROKEN_ANSWERS = 3


class BatchCompletion:
    """Settles the batches of one stage.

    Args:
        stage: the stage.
        queue: where rows go back to.
        tally: counts.
        suspects: remembers rows that cost replicas; None where rows cannot be told apart.
    """

    def __init__(
        self, stage: Stage, queue: DeadlineQueue, tally: StatsSink, suspects: QueryOfDeathDetector | None
    ) -> None:
        self._stage = stage
        self._queue = queue
        self._tally = tally
        self._suspects = suspects
        self._points = {(variant.name, point.name): point for variant in stage.variants for point in variant.points}

    def settle(  # noqa: C901 - one case for each ending
        self, parcel: Batch, ending: Ending, now: float
    ) -> None:
        """Give every member what the ending means for it."""
        if not isinstance(ending, Completed):
            for piece in parcel.batch:
                parcel.promise(piece, -1)
                if not piece.work.owner.waits:
                    piece.work.close()  # it would go back among the rows of callers
            self._return_riders(parcel, ending)
        match ending:
            case Completed():
                self._hand_out(parcel, ending, now)
                self._hand_shared(parcel, ending, now)
            case ReplicaLost():
                self._retry_lost(parcel, ending, now)
            case NotReady():
                for piece in parcel.batch:
                    self._return(piece, "ReplicaNotReady", alone=piece.alone, attempts=0)
            case Rejected():
                self._seek_culprit(parcel, ending)
            case BatchFailed():
                self._retry_broken(parcel, ending)
            case StreamCut():
                self._end_cut(parcel, ending)
            case Cancelled():
                self._tally.abandoned()
            case _:
                assert_never(ending)

    def _hand_out(self, parcel: Batch, answer: Completed, now: float) -> None:
        seconds = now - parcel.departed_at
        point = self._point_served(parcel, answer)
        for piece, own in zip(parcel.batch, answer.outputs, strict=True):
            waited = parcel.departed_at - piece.work.enqueued_at
            if piece.work.owner.waits:
                self._tally.waited(waited)
            if piece.work.closed:
                continue
            served = ServedRows(
                variant=parcel.variant,
                operating_point=point.name,
                batch_rows=parcel.rows,
                queue_seconds=waited,
                service_seconds=seconds,
                rows=piece.rows,
                accuracy=self._accuracy(parcel, point, piece),
                departed_at=parcel.departed_at,
                confidences=own[self._stage.confidence] if self._stage.confidence else None,
            )
            if parcel.again is not None and served.confidences is not None and self._stage.retryable:
                before = parcel.point.accuracy_for(piece.work.wish.task)
                self._look_again(piece, own, served, parcel.again.of_task(piece.work.wish.task), before=before)
            else:
                piece.work.add_piece(piece.start, piece.rows, own, served)

    def _hand_shared(self, parcel: Batch, answer: Completed, now: float) -> None:
        """Give those who ride along theirs; who has none after all is served by itself."""
        point = self._point_served(parcel, answer)
        for piece, own in zip(parcel.riders, answer.shared, strict=True):
            if own is None:
                piece.work.identities = ()  # an encoder that does not share will not do so the next time
                self._return(piece, "NotShared", alone=False, attempts=0)
                continue
            waited = max(parcel.departed_at - piece.work.enqueued_at, 0.0)
            served = ServedRows(
                variant=parcel.variant,
                operating_point=point.name,
                batch_rows=parcel.rows,
                queue_seconds=waited,
                service_seconds=now - max(parcel.departed_at, piece.work.enqueued_at),
                rows=piece.rows,
                accuracy=parcel.point.accuracy_for(piece.work.wish.task),
                departed_at=parcel.departed_at,
            )
            self._tally.waited(waited)
            piece.work.add_piece(piece.start, piece.rows, own, served)

    def hand_found(self, piece: RowSlice, home: Batch, outputs: Mapping[str, Array], now: float) -> None:
        """Give a row what a replica made of it before."""
        served = ServedRows(
            variant=home.variant,
            operating_point=home.point.name,
            batch_rows=piece.rows,
            queue_seconds=0.0,
            service_seconds=now - piece.work.enqueued_at,
            rows=piece.rows,
            accuracy=home.point.accuracy_for(piece.work.wish.task),
            departed_at=piece.work.enqueued_at,
        )
        piece.work.add_piece(piece.start, piece.rows, outputs, served)

    def _return_riders(self, parcel: Batch, ending: Ending) -> None:
        """Serve those who ride along by themselves, or with another; what costs replicas does not cost one for each."""
        at_fault = isinstance(ending, BatchFailed) or (isinstance(ending, ReplicaLost) and ending.delivered)
        alone = parcel.rows == 1 and isinstance(ending, Rejected)
        for piece in parcel.riders:
            if at_fault and not self._stage.retryable:
                self._fail_unrepeated(piece, "it rode along with a batch that failed")
            elif at_fault and piece.attempts + 1 >= MAX_LOST_REPLICAS:
                self._fail(piece, "replicas failed each time that they served what it shows")
            else:
                self._return(piece, "NotShared", alone=alone, attempts=int(at_fault))

    def _accuracy(self, parcel: Batch, point: OperatingPoint, piece: RowSlice) -> float:
        """Expected of these rows: the point's for their task, unless a second look at what was picked out is known.

        Where they lack what the point reads, it is that of the point that reads only what they have.
        """
        if piece.again is not None and piece.again.accuracy is not None and piece.again.point == point.name:
            return piece.again.accuracy
        task = piece.work.wish.task
        if len(piece.work.inputs) < len(self._stage.inputs):
            less = self._stage.reading_less(parcel.variant, point.name, piece.work.inputs)
            if less is not None:
                return less.judged(task).value
        return parcel.point.accuracy_for(task) if parcel.point.name == point.name else point.accuracy

    def _look_again(
        self, piece: RowSlice, outputs: Mapping[str, Array], served: ServedRows, again: EscalationRule, *, before: float
    ) -> None:
        """Hand out what is certain enough; queue the rest again, with the answer it has from a point that accurate."""
        confidences = np.asarray(served.confidences)
        doubted = ~(confidences >= again.below)  # also what is no number
        kept, unsure = again.accuracies(served.accuracy, float(doubted.mean()))
        if again.share is not None:  # of a single row the share says nothing
            unsure = again.of_doubted(served.accuracy)
        for start, stop, doubtful in _runs(doubted):
            own = {name: array[start:stop] for name, array in outputs.items()}
            record = replace(
                served,
                rows=stop - start,
                confidences=confidences[start:stop],
                provisional=doubtful,
                accuracy=unsure if doubtful else kept,
            )
            first, last = piece.start + start, piece.start + stop
            piece.work.add_piece(first, stop - start, own, record)
            if doubtful and not piece.work.closed:
                known = replace(record, accuracy=again.of_doubted(before))
                self._tally.looks_again(stop - start)
                self._queue.push(RowSlice(piece.work, first, last, provisional=known, again=again))

    def _point_served(self, parcel: Batch, answer: Completed) -> OperatingPoint:
        """The operating point the model server says it ran, else the one that was asked for."""
        return self._points.get((parcel.variant, answer.point)) or self._points[parcel.key]

    def _retry_lost(self, parcel: Batch, lost: ReplicaLost, now: float) -> None:
        """Only the batch that was computed is under suspicion: not one that waited behind it or never arrived."""
        self._tally.troubled(f"{lost.message}; it held a batch of {len(parcel.batch)} slices")
        suspected = lost.delivered and parcel.slot.computing is parcel
        for piece in parcel.batch:
            if lost.delivered and not self._stage.retryable:
                self._fail_unrepeated(piece, lost.message)
            elif suspected and piece.attempts + 1 >= MAX_LOST_REPLICAS:
                if self._suspects is not None:
                    self._suspects.add(piece.work, now)
                attempts = piece.attempts + 1
                self._fail(piece, f"{attempts} replicas were lost while they served it; the last: {lost.message}")
            elif suspected:
                self._return(piece, "ReplicaLost", alone=True)
            elif lost.delivered and parcel.slot.places and piece.attempts + 1 >= MAX_LOST_IN_COMPANY:
                self._fail(
                    piece, f"{piece.attempts + 1} replicas were lost while they served it; the last: {lost.message}"
                )
            else:
                counted = int(lost.delivered and parcel.slot.places > 0)
                self._return(piece, "ReplicaLost", alone=piece.alone, attempts=counted)

    def _end_cut(self, parcel: Batch, cut: StreamCut) -> None:
        """What a caller has read cannot be taken back; who has read nothing gets another answer from its beginning."""
        self._tally.troubled(cut.message)
        for piece in parcel.batch:
            if piece.work.owner.listens:
                self._end(piece, "AnswerCut", "its model server was lost in the middle of the answer", cut.message)
            elif not self._stage.retryable:
                self._fail_unrepeated(piece, cut.message)
            elif piece.attempts + 1 >= MAX_BROKEN_ANSWERS:
                self._fail(piece, cut.message)
            else:  # it began in time: from there on the whole answer's end counts, whoever writes it
                self._queue.postpone(piece.work, piece.work.ends_by)
                self._return(piece, "AnswerCut", alone=piece.alone)

    def _seek_culprit(self, parcel: Batch, rejected: Rejected) -> None:
        if len(parcel.batch) > 1:
            for piece in parcel.batch:
                self._return(piece, "QueryOfDeath", alone=True, attempts=0)
            return
        piece = parcel.batch[0]
        if piece.provisional is not None:
            piece.work.accept(piece.start, piece.stop)
        elif not piece.work.closed:
            message = f"stage {self._stage.name}: {rejected.message}"
            too_large = rejected.code == ErrorCode.PAYLOAD_TOO_LARGE.value
            piece.work.owner.work_refused(oversize(message) if too_large else invalid(message))

    def _retry_broken(self, parcel: Batch, broken: BatchFailed) -> None:
        self._tally.troubled(broken.message)
        for piece in parcel.batch:
            if broken.again and not self._stage.retryable:
                self._fail_unrepeated(piece, broken.message)
            elif not broken.again or piece.attempts + 1 >= MAX_BROKEN_ANSWERS:
                self._fail(piece, broken.message)
            else:
                self._return(piece, "ModelServerError", alone=True)

    def _return(self, piece: RowSlice, reason: str, *, alone: bool, attempts: int = 1) -> None:
        """Put a slice back where it was by its deadline; what it was to pull is given once, and is made anew."""
        if not piece.work.closed:
            self._tally.retried(reason)
            if EMBEDDINGS_INPUT in piece.work.inputs:
                piece.work.owner.work_starved(piece.work, counts=attempts > 0)
                return
            self._queue.push(replace(piece, attempts=piece.attempts + attempts, alone=alone))

    def _fail(self, piece: RowSlice, message: str) -> None:
        self._end(piece, "ModelServerError", "its model server failed", message)

    def _fail_unrepeated(self, piece: RowSlice, message: str) -> None:
        what = "its model server failed, maybe after it ran; the stage is not repeatable"
        self._end(piece, "NotRepeatable", what, message)

    def _end(self, piece: RowSlice, reason: str, what: str, message: str) -> None:
        if piece.provisional is not None:
            piece.work.accept(piece.start, piece.stop)
        elif not piece.work.closed:
            name, owner = self._stage.name, piece.work.owner
            self._tally.failed(owner.request_id, message)
            owner.work_refused(failure(reason, f"stage {name}: {what}", owner.request_id, stage=name))


def _runs(doubted: Array) -> Iterator[tuple[int, int, bool]]:
    """Where rows that are alike begin and end, and whether they are doubted."""
    edges = [0, *(np.flatnonzero(np.diff(doubted)) + 1).tolist(), len(doubted)]
    return ((start, stop, bool(doubted[start])) for start, stop in pairwise(edges))
