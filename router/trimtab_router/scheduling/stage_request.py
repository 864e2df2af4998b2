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
from trimtab_router.request.request_options import NO_OPTIONS, RequestOptions
from trimtab_router.scheduling.prompt_lengths import PromptFeatures

Signature = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(slots=True)  # not frozen, which costs as much as all else about making one
class ServedRows:
    """How rows that lie beside each other were served, for the answer's parameters. Nobody changes it."""

    variant: str
    """What computed them."""
    operating_point: str
    """How."""
    batch_rows: int
    """Of the batch they were in."""
    queue_seconds: float
    """Before it left."""
    service_seconds: float
    """From then to its answer."""
    rows: int
    """How many."""
    accuracy: float
    """Expected of them."""
    dispatched_at: float
    """Seconds of the desk's clock."""
    confidences: Array | None = None
    """[rows], how certain the model is of each; None where it does not say."""
    escalation_pending: bool = False
    """Whether a second look at them was meant."""

    def part(self, start: int, stop: int) -> "ServedRows":
        """Of these of its rows."""
        confidences = self.confidences
        return replace(self, rows=stop - start, confidences=None if confidences is None else confidences[start:stop])


class RequestListener(Protocol):
    """Whoever is given what becomes of the work."""

    trace_parent: str
    request_id: str
    has_listener: bool
    """Whether pieces go on to a caller, who cannot be told anything else instead."""
    has_client: bool
    """Whether a caller waits: else its rows are tried once, and how long they lay is nobody's wait."""

    def on_chunk(self, request: "StageRequest", row: int, row_slice: Chunk | LastChunk, now: float) -> None:
        """Take the next piece of a row's answer."""

    def on_completed(self, request: "StageRequest", outputs: Mapping[str, Array], served: Sequence[ServedRows]) -> None:
        """Take the outputs of all rows, in row order."""

    def on_rows_completed(self, request: "StageRequest", start: int, outputs: Mapping[str, Array]) -> None:
        """Take the outputs of rows from `start` on, while others are still missing."""

    def on_refused(self, refusal: Refusal) -> None:
        """Take note that these rows will not be served."""

    def on_embeddings_lost(self, request: "StageRequest", *, counts: bool) -> None:
        """Take note that what these rows were to pull is gone; whether that `counts` as a try."""


@dataclass(frozen=True, slots=True)
class EscalationRule:
    """The rows of a batch that its model is less certain of than `below` are to be looked at again."""

    confidence_below: float
    """Confidence, as the model tells it."""
    to: str
    """The operating point meant for the second look."""
    accuracy: float | None = None
    """Expected of all rows of the batch once that is done; None: each row has that of the point it ran at."""
    share: float | None = None
    """Of all rows, how many are less certain where that was measured; None where nobody knows."""
    by_task: Mapping[str, TaskEscalation] = field(default_factory=dict, hash=False)
    """What holds of rows of these tasks instead; where there are any, rows of others stay as they are."""

    def for_task(self, task: str) -> "EscalationRule":
        """What holds of the rows of a task."""
        if not self.by_task:
            return self
        own = self.by_task.get(task)
        return (
            EscalationRule(0.0, self.to)
            if own is None
            else EscalationRule(own.confidence_below, self.to, own.accuracy, own.share)
        )

    def low_confidence_accuracy(self, first: float) -> float:
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
        "_parts",
        "accuracy_floor",
        "closed",
        "completion_deadline",
        "deadline",
        "dispatched_rows",
        "due_at",
        "enqueued_at",
        "expected_correct",
        "identities",
        "inputs",
        "options",
        "owner",
        "prefill_seconds",
        "prompt_features",
        "prompt_tokens",
        "queued_rows",
        "rows",
        "signature",
        "special",
        "stage",
        "task",
    )

    def __init__(
        self,
        owner: RequestListener,
        ready_stage: ReadyStage,
        *,
        deadline: float,
        now: float,
        completion_deadline: float | None = None,
        options: RequestOptions = NO_OPTIONS,
        accuracy_floor: float = 0.0,
        may_escalate: bool = False,
    ) -> None:
        self.owner = owner
        self.stage = ready_stage.stage
        self.rows = ready_stage.rows
        self.inputs = ready_stage.inputs
        self.deadline = deadline
        self.due_at = deadline
        """Its deadline, less what its prompt takes to be read beyond what is predicted for all: who is due first goes
        first, and slack is counted from here."""
        self.prefill_seconds = 0.0
        """That difference, which is below 0 for a short prompt."""
        self.prompt_features: Sequence[PromptFeatures | None] = ()
        """Of each row that is to be written, what is known of its prompt; empty where it is not that of a chat."""
        self.prompt_tokens: Sequence[float] = ()
        """Of each row, how many tokens its prompt is predicted to have; empty where nobody knows."""
        self.completion_deadline = deadline if completion_deadline is None else completion_deadline
        self.enqueued_at = now
        self.options = options
        self.task = ""
        """The task of its model that its request named, whose number each replica tells; empty where it named none."""
        self.accuracy_floor = accuracy_floor
        self.special = may_escalate or (options is not NO_OPTIONS and not options.only_latency)
        """Whether it matters to a queue which point serves it, or whether it is the one to be dropped."""
        self.signature: Signature = tuple([(name, array.shape[1:]) for name, array in ready_stage.inputs.items()])
        self.closed = False
        self.identities: Sequence[Hashable] = ()
        """Of each row what it shows: rows that are equal by it get the same answer. Empty where nobody knows."""
        self.queued_rows = 0
        self.expected_correct = 0.0
        """How many of the rows that have left are expected to be right."""
        self.dispatched_rows = 0
        """How many these are; those that wait for a second look are among them."""
        self._missing = ready_stage.rows
        self._parts: list[_ResultPart] = []

    @property
    def missing_accuracy(self) -> float:
        """The mean accuracy that the rows which have not left must have, so that all together reach the floor."""
        if not self.accuracy_floor:
            return 0.0
        return (self.accuracy_floor * self.rows - self.expected_correct) / max(self.rows - self.dispatched_rows, 1)

    @property
    def has_response(self) -> bool:
        """Whether every row has an answer, if only a provisional one."""
        return self._missing == sum(row_slice.stop - row_slice.start for row_slice in self._parts if row_slice.open)

    def set_prefill_seconds(self, prefill_seconds: float) -> None:
        """Know how many seconds its longest prompt takes to be read beyond what is predicted for all."""
        self.prefill_seconds = prefill_seconds
        self.due_at = self.deadline - prefill_seconds

    def set_deadline(self, deadline: float) -> None:
        """Have another deadline from now on."""
        self.deadline = deadline
        self.due_at = deadline - self.prefill_seconds

    def close(self) -> None:
        """No longer wanted: free the inputs at once, wherever slices of it still lie."""
        self.closed = True
        self.inputs = {}
        self.identities = ()
        self._parts = []

    def add_result(self, start: int, rows: int, outputs: Mapping[str, Array], served: ServedRows) -> None:
        """Take the outputs of the slice that starts at `start`; hand all over once none is missing.

        A provisional one is kept until a better one comes or none is awaited any more.
        """
        if self.closed:
            return
        if rows == self.rows and not served.escalation_pending:  # as almost always
            self.close()
            self.owner.on_completed(self, outputs, (served,))
            return
        stop = start + rows
        if self._parts:
            self._missing += self._remove_parts(start, stop)
        self._parts.append(_ResultPart(start, stop, outputs, served, served.escalation_pending))
        if not served.escalation_pending:
            self._missing -= rows
            self._complete_if_done()
            if not self.closed:
                self.owner.on_rows_completed(self, start, outputs)

    def accept_provisional(self, start: int, stop: int) -> None:
        """Wait no longer for a better answer to these rows."""
        if self.closed:
            return
        for row_slice in self._parts:
            first, last = max(row_slice.start, start), min(row_slice.stop, stop)
            if row_slice.open and first < last:
                self._remove_parts(first, last)
                self._parts.append(replace(row_slice.part(first, last), open=False))
                self._missing -= last - first
        self._complete_if_done()

    def _remove_parts(self, start: int, stop: int) -> int:
        """Forget what is known of these rows; returns how many of them nobody waited for any more."""
        settled = 0
        kept: list[_ResultPart] = []
        for row_slice in self._parts:
            first, last = max(row_slice.start, start), min(row_slice.stop, stop)
            if first >= last:
                kept.append(row_slice)
                continue
            settled += 0 if row_slice.open else last - first
            kept += [
                row_slice.part(*edges)
                for edges in ((row_slice.start, first), (last, row_slice.stop))
                if edges[0] < edges[1]
            ]
        self._parts = kept
        return settled

    def _complete_if_done(self) -> None:
        if self._missing:
            return
        row_slices = sorted(self._parts, key=lambda row_slice: row_slice.start)
        joined = (
            row_slices[0].outputs if len(row_slices) == 1 else _join([row_slice.outputs for row_slice in row_slices])
        )
        records = [row_slice.served for row_slice in row_slices]
        self.close()
        self.owner.on_completed(self, joined, records)


@dataclass(slots=True, eq=False)
class RowSlice:
    """Rows `start` to `stop` (exclusive) of a work. Nobody changes it.

    `attempts` counts the replicas that were lost or broke while holding it; once one was lost it travels `alone`, so
    that rows which break a replica are found out without harm to others. Rows that are looked at again know how they
    were served before (`provisional`) and what was meant for them (`again`).
    """

    request: StageRequest
    start: int
    stop: int
    attempts: int = 0
    alone: bool = False
    provisional_response: ServedRows | None = None
    escalation: EscalationRule | None = None

    @property
    def rows(self) -> int:
        """How many rows."""
        return self.stop - self.start

    @property
    def tokens(self) -> float:
        """How many tokens its prompts are predicted to have; 0 where nobody knows."""
        return sum(self.request.prompt_tokens[self.start : self.stop])

    def first(self, rows: int) -> "RowSlice":
        """Only so many of these rows."""
        return self.part(self.start, self.start + rows)

    def part(self, start: int, stop: int) -> "RowSlice":
        """Only these of its rows, with what is known of them."""
        known = self.provisional_response
        if known is not None:
            known = known.part(start - self.start, stop - self.start)
        return replace(self, start=start, stop=stop, provisional_response=known)

    def array(self, name: str) -> Array:
        """These rows of an input."""
        return self.request.inputs[name][self.start : self.stop]


def _join(row_slices: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    return {name: np.concatenate([row_slice[name] for row_slice in row_slices]) for name in row_slices[0]}
