"""`StageRequest`: the rows of one stage for one request; `RowSlice`: the part of them that a batch holds."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from trimtab_pipelines.escalation import TaskEscalation
from trimtab_protocol.chat.engine_routes import ForwardedRequest
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk
from trimtab_protocol.tensors import Array
from trimtab_router.refusal import Refusal
from trimtab_router.request import NO_OPTIONS, RequestOptions
from trimtab_router.scheduling.prompt_lengths import PromptFeatures

Signature = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(slots=True)  # frozen would double the cost of construction
class ServedRows:
    """How consecutive rows were served, for the response's parameters. Treat it as immutable."""

    variant: str
    operating_point: str
    batch_rows: int
    """Of their batch."""
    queue_seconds: float
    """Until dispatch."""
    service_seconds: float
    """From dispatch to the response."""
    rows: int
    accuracy: float
    """Expected."""
    dispatched_at: float
    """On the scheduler's clock."""
    confidences: Array | None = None
    """Shape [rows]; None if the stage has no confidence output."""
    escalation_pending: bool = False
    """Whether the rows should have been escalated and were not."""
    escalated: bool = False
    """Whether another point had served the rows before, with low confidence."""
    counted_by: Mapping[str, str] = field(default_factory=dict)
    """Outputs with any number of entries per row: the output that holds this number."""

    def part(self, start: int, stop: int) -> "ServedRows":
        confidences = self.confidences
        return replace(self, rows=stop - start, confidences=None if confidences is None else confidences[start:stop])

    def slice_outputs(self, outputs: Mapping[str, Array], start: int, stop: int) -> dict[str, Array]:
        """Outputs of the rows from `start` to `stop`, counted from the first of these rows."""
        part = {name: array[start:stop] for name, array in outputs.items() if name not in self.counted_by}
        for name, count in self.counted_by.items():
            first = int(outputs[count][:start].sum())
            part[name] = outputs[name][first : first + int(part[count].sum())]
        return part


class RequestListener(Protocol):
    """Receives what happens to a stage request."""

    trace_parent: str
    request_id: str
    has_listener: bool
    """Whether chunks are sent to the client, so that no other response can replace them."""
    has_client: bool
    """Whether a client waits. Other rows are tried once, and their queueing time is not reported."""
    forwarded: ForwardedRequest | None
    """Set if the request is one that only a third-party engine reads."""

    def on_chunk(self, request: "StageRequest", row: int, row_slice: Chunk | LastChunk, now: float) -> None: ...

    def on_completed(
        self, request: "StageRequest", outputs: Mapping[str, Array], served: Sequence[ServedRows]
    ) -> None: ...

    def on_rows_completed(self, request: "StageRequest", start: int, outputs: Mapping[str, Array]) -> None:
        """Receive the outputs of the rows from `start` on, while others are missing."""

    def on_refused(self, refusal: Refusal) -> None: ...

    def on_embeddings_lost(self, request: "StageRequest", *, counts: bool) -> None:
        """The embeddings of these rows are gone; `counts` as a failed attempt."""


@dataclass(frozen=True, slots=True)
class EscalationRule:
    """Rule of an escalation: rows with less confidence than `confidence_below` run again at the point `to`."""

    confidence_below: float
    to: str
    accuracy: float | None = None
    """Of all rows after the escalation; None: each row's of its point."""
    share: float | None = None
    """Profiled share of rows below the threshold; None if unknown."""
    by_task: Mapping[str, TaskEscalation] = field(default_factory=dict, hash=False)
    """Rules of single tasks. If there are any, rows of other tasks are not escalated."""
    variant: str = ""
    """Variant of the point `to`."""

    @property
    def target(self) -> tuple[str, str]:
        """Variant and point that serve the escalated rows."""
        return self.variant, self.to

    def for_task(self, task: str) -> "EscalationRule":
        if not self.by_task:
            return self
        own = self.by_task.get(task)
        return (
            EscalationRule(0.0, self.to, variant=self.variant)
            if own is None
            else EscalationRule(own.confidence_below, self.to, own.accuracy, own.share, variant=self.variant)
        )

    def low_confidence_accuracy(self, first: float) -> float:
        """Return the first-pass accuracy of rows below the threshold; `first` is that of all rows."""
        return first if self.share is None else self.accuracies(first, self.share)[1]

    def accuracies(self, first: float, share: float) -> tuple[float, float]:
        """Return the accuracy of the confident rows, and of the others (`share`) until they are escalated.

        Together they have the accuracy of the first pass, so the low-confidence rows are the less accurate ones.
        """
        if self.accuracy is None:
            return first, first
        if not share:  # all rows are as confident as those above the threshold
            return self.accuracy, self.accuracy
        return self.accuracy, min(max((first - (1.0 - share) * self.accuracy) / share, 0.0), 1.0)


@dataclass(slots=True, eq=False)
class _ResultPart:
    """Rows with a result; `open` while an escalation is pending. Treat it as immutable."""

    start: int
    stop: int
    outputs: Mapping[str, Array]
    served: ServedRows
    open: bool = False

    def part(self, start: int, stop: int) -> "_ResultPart":
        own = start - self.start, stop - self.start
        outputs = self.served.slice_outputs(self.outputs, *own)
        return _ResultPart(start, stop, outputs, self.served.part(*own), self.open)


class StageRequest:
    """The rows of one stage for one request, completed together or not at all.

    `deadline` is in seconds on the scheduler's clock; in a generation stage, that of the first token. `inputs` are not
    modified. What few requests have is a default of the class: a request stores only what it sets.
    """

    variant = ""  # of the latest chunk
    prefill_seconds = 0.0  # of the longest prompt beyond the planned length; negative if shorter
    prompt_features: Sequence[PromptFeatures | None] = ()  # by row; empty if it is not a chat
    prompt_tokens: Sequence[float] = ()  # predicted for each row; empty if unknown
    task = ""  # named by the request, if a model of this stage has it; replicas report its number
    tenant = ""  # replicas share caches within a tenant only; empty if unknown
    closed = False
    identities: Sequence[Hashable] = ()  # rows of equal identity have equal outputs; empty if unknown
    queued_rows = 0
    expected_correct = 0.0  # expected number of correct rows among those dispatched
    dispatched_rows = 0  # number of these rows, rows that await escalation included
    confidence_shift = 0.0  # expected change of their confidence by the variants that gave their inputs

    def __init__(
        self,
        owner: RequestListener,
        stage: str,
        rows: int,
        inputs: Mapping[str, Array],
        *,
        deadline: float,
        now: float,
        options: RequestOptions = NO_OPTIONS,
        accuracy_floor: float = 0.0,
    ) -> None:
        self.owner = owner
        self.stage = stage
        self.rows = rows
        self.inputs = inputs
        self.deadline = deadline
        self.due_at = deadline  # less `prefill_seconds`; queues are ordered by it, and slack is measured from it
        self.completion_deadline = deadline  # of the last token
        self.enqueued_at = now
        self.options = options
        self.accuracy_floor = accuracy_floor
        self.special = options is not NO_OPTIONS and not options.only_latency
        """Whether it matters which point serves it, rows may run twice, or its drop rank differs."""
        self.signature: Signature = ()
        for name, array in inputs.items():
            self.signature += ((name, array.shape[1:]),)
        self._missing = rows
        self._parts: list[_ResultPart] = []

    @property
    def missing_accuracy(self) -> float:
        """Mean accuracy that the other rows must have for the request to reach its floor."""
        if not self.accuracy_floor:
            return 0.0
        return (self.accuracy_floor * self.rows - self.expected_correct) / max(self.rows - self.dispatched_rows, 1)

    @property
    def has_response(self) -> bool:
        return self._missing == sum(row_slice.stop - row_slice.start for row_slice in self._parts if row_slice.open)

    def set_prefill_seconds(self, prefill_seconds: float) -> None:
        self.prefill_seconds = prefill_seconds
        self.due_at = self.deadline - prefill_seconds

    def set_deadline(self, deadline: float) -> None:
        self.deadline = deadline
        self.due_at = deadline - self.prefill_seconds

    def close(self) -> None:
        """Mark it as no longer needed, and free its inputs even while slices of it are queued."""
        self.closed = True
        self.inputs = {}
        self.identities = ()
        self._parts = []

    def add_result(self, start: int, rows: int, outputs: Mapping[str, Array], served: ServedRows) -> None:
        """Store outputs from row `start` on, provisional ones until better ones arrive; complete the request."""
        if self.closed:
            return
        if rows == self.rows and not served.escalation_pending:  # the common case
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
        """Remove stored results of these rows; return how many of them were not provisional."""
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
    """Rows `start` to `stop` (exclusive) of a stage request. Treat it as immutable.

    `attempts` counts the replicas that failed while they held it. After a loss it runs `alone`, so that rows which
    break replicas are found without harm to others. A slice that awaits escalation has its `provisional_response` and
    the `escalation` rule.
    """

    request: StageRequest
    start: int
    stop: int
    attempts: int = 0
    alone: bool = False
    provisional_response: ServedRows | None = None
    escalation: EscalationRule | None = None
    failed_on: str = ""
    """Name of the replica that failed on it last, if it may have been at fault."""
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = self.stop - self.start

    @property
    def tokens(self) -> float:
        return sum(self.request.prompt_tokens[self.start : self.stop])

    def first(self, rows: int) -> "RowSlice":
        return self.part(self.start, self.start + rows)

    def part(self, start: int, stop: int) -> "RowSlice":
        known = self.provisional_response
        if known is not None:
            known = known.part(start - self.start, stop - self.start)
        return replace(self, start=start, stop=stop, provisional_response=known)

    def array(self, name: str) -> Array:
        array = self.request.inputs[name]
        return array if self.rows == len(array) else array[self.start : self.stop]


def _join(row_slices: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    return {name: np.concatenate([row_slice[name] for row_slice in row_slices]) for name in row_slices[0]}
