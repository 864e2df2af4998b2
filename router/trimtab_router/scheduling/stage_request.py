"""The unit the queues hold: rows of one stage for one request, and the slices of them that travel in batches. Pure."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from trimtab_pipelines.escalation import TaskEscalation
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk
from trimtab_protocol.tensors import Array
from trimtab_router.refusal import Refusal
from trimtab_router.request.graph import ReadyStage
from trimtab_router.request.request_options import NO_WISH, RequestOptions
from trimtab_router.scheduling.prompt_lengths import PromptFeatures

Signature = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(slots=True)  # not frozen, which costs as much as all else about making one
class ServedRows:
    """How rows that lie beside each other were served, for the answer's parameters. Nobody changes it.

    Attributes:
        variant: what computed them.
        operating_point: how.
        batch_rows: of the batch they were in.
        queue_seconds: before it left.
        service_seconds: from then to its answer.
        rows: how many.
        accuracy: expected of them.
        departed_at: seconds of the desk's clock.
        confidences: [rows], how certain the model is of each; None where it does not say.
        provisional: whether a second look at them was meant.
    """

    variant: str
    operating_point: str
    batch_rows: int
    queue_seconds: float
    service_seconds: float
    rows: int
    accuracy: float
    departed_at: float
    confidences: Array | None = None
    provisional: bool = False

    def part(self, start: int, stop: int) -> "ServedRows":
        """Of these of its rows."""
        confidences = self.confidences
        return replace(self, rows=stop - start, confidences=None if confidences is None else confidences[start:stop])


class RequestListener(Protocol):
    """Whoever is given what becomes of the work."""

    trace_parent: str
    request_id: str
    listens: bool
    """Whether pieces go on to a caller, who cannot be told anything else instead."""
    waits: bool
    """Whether a caller waits: else its rows are tried once, and how long they lay is nobody's wait."""

    def work_written(self, work: "StageRequest", row: int, piece: Chunk | LastChunk, now: float) -> None:
        """Take the next piece of a row's answer."""

    def work_completed(self, work: "StageRequest", outputs: Mapping[str, Array], served: Sequence[ServedRows]) -> None:
        """Take the outputs of all rows, in row order."""

    def work_advanced(self, work: "StageRequest", start: int, outputs: Mapping[str, Array]) -> None:
        """Take the outputs of rows from `start` on, while others are still missing."""

    def work_refused(self, refusal: Refusal) -> None:
        """Take note that these rows will not be served."""

    def work_starved(self, work: "StageRequest", *, counts: bool) -> None:
        """Take note that what these rows were to pull is gone; whether that `counts` as a try."""


@dataclass(frozen=True, slots=True)
class EscalationRule:
    """The rows of a batch that its model is less certain of than `below` are to be looked at again.

    Attributes:
        below: confidence, as the model tells it.
        point: the operating point meant for the second look.
        accuracy: expected of all rows of the batch once that is done; None: each row has that of the point it ran at.
        share: of all rows, how many are less certain where that was measured; None where nobody knows.
        by_task: what holds of rows of these tasks instead; where there are any, rows of others stay as they are.
    """

    below: float
    point: str
    accuracy: float | None = None
    share: float | None = None
    by_task: Mapping[str, TaskEscalation] = field(default_factory=dict, hash=False)

    def of_task(self, task: str) -> "EscalationRule":
        """What holds of the rows of a task."""
        if not self.by_task:
            return self
        own = self.by_task.get(task)
        return (
            EscalationRule(0.0, self.point)
            if own is None
            else EscalationRule(own.confidence_below, self.point, own.accuracy, own.share)
        )

    def of_doubted(self, first: float) -> float:
        """Expected of the rows that are less certain after a first look which has `first` over all rows."""
        return first if self.share is None else self.accuracies(first, self.share)[1]

    def accuracies(self, first: float, share: float) -> tuple[float, float]:
        """Expected of the rows that are kept, and of the others as long as they have no second look.

        Together they have what the first look has: those that are picked out are the worse ones.

        Args:
            first: expected of all rows after the first look.
            share: of the rows that are picked out.
        """
        if self.accuracy is None:
            return first, first
        if not share:  # all of them are as certain as those that are kept
            return self.accuracy, self.accuracy
        return self.accuracy, min(max((first - (1.0 - share) * self.accuracy) / share, 0.0), 1.0)


@dataclass(slots=True, eq=False)
class _ResultPart:
    """Rows that have an answer; `open`: a better one is still awaited. Nobody changes it."""

    start: int
    stop: int
    outputs: Mapping[str, Array]
    served: ServedRows
    open: bool = False

    def part(self, start: int, stop: int) -> "_ResultPart":
        """Only these of its rows."""
        own = slice(start - self.start, stop - self.start)
        served = self.served.part(own.start, own.stop)
        return _ResultPart(start, stop, {name: array[own] for name, array in self.outputs.items()}, served, self.open)


class StageRequest:
    """One stage's share of one request: `rows` rows, answered as a whole or not at all.

    Args:
        owner: whoever waits for it.
        runnable: stage, rows and inputs.
        deadline: in seconds of the desk's clock.
        now: the same.
        ends_by: as `deadline`, for what comes after the first piece of an answer that is written; None: no later.
        wish: what its request wishes.
        accuracy_floor: what this stage must give of it.
        looked_at_again: whether rows of it may be served twice.
    """

    __slots__ = (
        "_missing",
        "_pieces",
        "accuracy_floor",
        "closed",
        "deadline",
        "due_at",
        "ends_by",
        "enqueued_at",
        "identities",
        "inputs",
        "owner",
        "prefill_seconds",
        "promised",
        "promised_rows",
        "prompts",
        "queued_rows",
        "rows",
        "signature",
        "special",
        "stage",
        "task",
        "tokens",
        "wish",
    )

    def __init__(
        self,
        owner: RequestListener,
        runnable: ReadyStage,
        *,
        deadline: float,
        now: float,
        ends_by: float | None = None,
        wish: RequestOptions = NO_WISH,
        accuracy_floor: float = 0.0,
        looked_at_again: bool = False,
    ) -> None:
        self.owner = owner
        self.stage = runnable.stage
        self.rows = runnable.rows
        self.inputs = runnable.inputs
        self.deadline = deadline
        self.due_at = deadline
        """Its deadline, less what its prompt takes to be read beyond what is predicted for all: who is due first goes
        first, and slack is counted from here."""
        self.prefill_seconds = 0.0
        """That difference, which is below 0 for a short prompt."""
        self.prompts: Sequence[PromptFeatures | None] = ()
        """Of each row that is to be written, what is known of its prompt; empty where it is not that of a chat."""
        self.tokens: Sequence[float] = ()
        """Of each row, how many tokens its prompt is predicted to have; empty where nobody knows."""
        self.ends_by = deadline if ends_by is None else ends_by
        self.enqueued_at = now
        self.wish = wish
        self.task = ""
        """The task of its model that its request named, whose number each replica tells; empty where it named none."""
        self.accuracy_floor = accuracy_floor
        self.special = looked_at_again or (wish is not NO_WISH and not wish.plain)
        """Whether it matters to a queue which point serves it, or whether it is the one to be dropped."""
        self.signature: Signature = tuple([(name, array.shape[1:]) for name, array in runnable.inputs.items()])
        self.closed = False
        self.identities: Sequence[Hashable] = ()
        """Of each row what it shows: rows that are equal by it get the same answer. Empty where nobody knows."""
        self.queued_rows = 0
        self.promised = 0.0
        """How many of the rows that have left are expected to be right."""
        self.promised_rows = 0
        """How many these are; those that wait for a second look are among them."""
        self._missing = runnable.rows
        self._pieces: list[_ResultPart] = []

    @property
    def missing_accuracy(self) -> float:
        """The mean accuracy that the rows which have not left must have, so that all together reach the floor."""
        if not self.accuracy_floor:
            return 0.0
        return (self.accuracy_floor * self.rows - self.promised) / max(self.rows - self.promised_rows, 1)

    @property
    def answered(self) -> bool:
        """Whether every row has an answer, if only a provisional one."""
        return self._missing == sum(piece.stop - piece.start for piece in self._pieces if piece.open)

    def read_in(self, prefill_seconds: float) -> None:
        """Know how many seconds its longest prompt takes to be read beyond what is predicted for all."""
        self.prefill_seconds = prefill_seconds
        self.due_at = self.deadline - prefill_seconds

    def postpone(self, deadline: float) -> None:
        """Have another deadline from now on."""
        self.deadline = deadline
        self.due_at = deadline - self.prefill_seconds

    def close(self) -> None:
        """No longer wanted: free the inputs at once, wherever slices of it still lie."""
        self.closed = True
        self.inputs = {}
        self.identities = ()
        self._pieces = []

    def add_piece(self, start: int, rows: int, outputs: Mapping[str, Array], served: ServedRows) -> None:
        """Take the outputs of the slice that starts at `start`; hand all over once none is missing.

        A provisional one is kept until a better one comes or none is awaited any more.
        """
        if self.closed:
            return
        if rows == self.rows and not served.provisional:  # as almost always
            self.close()
            self.owner.work_completed(self, outputs, (served,))
            return
        stop = start + rows
        if self._pieces:
            self._missing += self._take_out(start, stop)
        self._pieces.append(_ResultPart(start, stop, outputs, served, served.provisional))
        if not served.provisional:
            self._missing -= rows
            self._finish()
            if not self.closed:
                self.owner.work_advanced(self, start, outputs)

    def accept(self, start: int, stop: int) -> None:
        """Wait no longer for a better answer to these rows."""
        if self.closed:
            return
        for piece in self._pieces:
            first, last = max(piece.start, start), min(piece.stop, stop)
            if piece.open and first < last:
                self._take_out(first, last)
                self._pieces.append(replace(piece.part(first, last), open=False))
                self._missing -= last - first
        self._finish()

    def _take_out(self, start: int, stop: int) -> int:
        """Forget what is known of these rows; returns how many of them nobody waited for any more."""
        settled = 0
        kept: list[_ResultPart] = []
        for piece in self._pieces:
            first, last = max(piece.start, start), min(piece.stop, stop)
            if first >= last:
                kept.append(piece)
                continue
            settled += 0 if piece.open else last - first
            kept += [piece.part(*edges) for edges in ((piece.start, first), (last, piece.stop)) if edges[0] < edges[1]]
        self._pieces = kept
        return settled

    def _finish(self) -> None:
        if self._missing:
            return
        pieces = sorted(self._pieces, key=lambda piece: piece.start)
        joined = pieces[0].outputs if len(pieces) == 1 else _join([piece.outputs for piece in pieces])
        records = [piece.served for piece in pieces]
        self.close()
        self.owner.work_completed(self, joined, records)


@dataclass(slots=True, eq=False)
class RowSlice:
    """Rows `start` to `stop` (exclusive) of a work. Nobody changes it.

    `attempts` counts the replicas that were lost or broke while holding it; once one was lost it travels `alone`, so
    that rows which break a replica are found out without harm to others. Rows that are looked at again know how they
    were served before (`provisional`) and what was meant for them (`again`).
    """

    work: StageRequest
    start: int
    stop: int
    attempts: int = 0
    alone: bool = False
    provisional: ServedRows | None = None
    again: EscalationRule | None = None

    @property
    def rows(self) -> int:
        """How many rows."""
        return self.stop - self.start

    @property
    def tokens(self) -> float:
        """How many tokens its prompts are predicted to have; 0 where nobody knows."""
        return sum(self.work.tokens[self.start : self.stop])

    def first(self, rows: int) -> "RowSlice":
        """Only so many of these rows."""
        return self.part(self.start, self.start + rows)

    def part(self, start: int, stop: int) -> "RowSlice":
        """Only these of its rows, with what is known of them."""
        known = self.provisional
        if known is not None:
            known = known.part(start - self.start, stop - self.start)
        return replace(self, start=start, stop=stop, provisional=known)

    def array(self, name: str) -> Array:
        """These rows of an input."""
        return self.work.inputs[name][self.start : self.stop]


def _join(pieces: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
