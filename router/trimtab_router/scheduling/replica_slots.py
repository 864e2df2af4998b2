"""`ReplicaSlots`: a replica as its scheduler sees it, with the batches in flight on it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_protocol.tensors import Array
from trimtab_router.scheduling.policies.interface import NEVER, Point
from trimtab_router.scheduling.service_time import WEIGHT, Key
from trimtab_router.scheduling.stage_request import EscalationRule, RowSlice


@dataclass(slots=True)  # frozen would double the cost of construction
class Completed:
    """Every row slice has its outputs. Treat it as immutable."""

    outputs: Sequence[Mapping[str, Array]]
    """Of each row slice, in the order of the batch."""
    point: str
    """The operating point that ran."""
    compute_seconds: float | None = None
    """Reported by the replica; None if it reports none."""
    replica_queue_seconds: float | None = None
    """Time in the replica's queue, as reported; None if it reports none."""
    shared_outputs: Sequence[Mapping[str, Array] | None] = ()
    """Of each joined row; None if it was not stored."""


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """The replica disappeared, timed out, or returned another batch; `delivered`: it may have received the rows."""

    message: str
    delivered: bool = True
    disconnected: bool = False
    """Whether its connection broke, so that its process may have ended."""


@dataclass(frozen=True, slots=True)
class NotReady:
    """The replica reports that it cannot serve now."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """The replica rejects the rows of the batch; `code` is its HTTP status."""

    message: str
    code: int = 400


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """The replica failed or returned malformed outputs; `retryable`: a retry may succeed."""

    message: str
    retryable: bool = True


@dataclass(frozen=True, slots=True)
class StreamCut:
    """A stream ended early; `lost`: because the replica disappeared."""

    message: str
    lost: bool = True


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client disconnected, and the generation at the replica was cancelled."""


BatchOutcome = Completed | ReplicaLost | NotReady | Rejected | BatchFailed | StreamCut | Cancelled


NOTHING: frozenset[str] = frozenset()
MIN_COMPUTE_SECONDS = 0.002  # shorter batches are not prefetched: nothing would be gained
MARGIN_SECONDS = 0.0005  # jitter of a timer on a busy event loop


@dataclass(slots=True, eq=False)  # frozen would double the cost of construction
class Batch:
    """A batch in flight. Times are seconds on the scheduler's clock. Treat it as immutable."""

    replica: "ReplicaSlots"
    variant: str
    point: Point
    """The requested operating point."""
    row_slices: Sequence[RowSlice]
    rows: int
    """Of all slices."""
    dispatched_at: float
    found_idle: bool
    """Whether its replica had no other batch."""
    escalation: EscalationRule | None = None
    """The rule by which low-confidence rows return to the queue; None for none."""
    early_prefill: bool = False
    """Whether it was dispatched before all of its images were encoded."""
    weight: int = 1
    """Of its rows among concurrent ones: the seconds that a row adds, in those of the lightest point."""
    concurrent_prefills: int = 0
    """Weights of the prompts that its replica prefilled at dispatch; 0 outside generation stages."""
    joined_rows: list[RowSlice] = field(default_factory=list)
    """Of the same content as its own, as they joined."""
    key: Key = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.variant, self.point.name

    @property
    def is_computing(self) -> bool:
        """Whether its replica computes it now, and not only holds it."""
        return self.replica.computing is self

    @property
    def tokens(self) -> float:
        if not self.row_slices[0].request.prompt_tokens:
            return 0.0
        return sum([row_slice.tokens for row_slice in self.row_slices])

    @property
    def prefill_seconds(self) -> float:
        """Of its longest prompt, beyond the planned prompt length."""
        return max([row_slice.request.prefill_seconds for row_slice in self.row_slices])

    def note_expected_correct(self, row_slice: RowSlice, sign: int = 1) -> None:
        """Add the expected correct rows of a slice to its request, or subtract them, if the request has a floor."""
        if not row_slice.request.accuracy_floor:
            return
        row_slice.request.expected_correct += sign * self._expected_correct(row_slice)
        if row_slice.provisional_response is None:
            row_slice.request.dispatched_rows += sign * row_slice.rows

    def _expected_correct(self, row_slice: RowSlice) -> float:
        before = row_slice.provisional_response.accuracy if row_slice.provisional_response is not None else 0.0
        if row_slice.escalation is not None and row_slice.escalation.accuracy is not None:
            return 0.0  # counted at the first dispatch
        if self.escalation is not None and self.escalation.accuracy is not None:
            return self.escalation.accuracy * row_slice.rows
        return (self.point.accuracy_for(row_slice.request.options.task) - before) * row_slice.rows


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load that third-party servers report, of all their clients."""

    waiting: float = 0.0
    running: float = 0.0
    cache_usage: float = 0.0
    """Share of the KV cache in use; of several servers, the highest."""
    preemptions: float = 0.0

    @classmethod
    def total(cls, loads: Iterable["EngineLoad"]) -> "EngineLoad":
        loads = [*loads]
        usage = max((load.cache_usage for load in loads), default=0.0)
        waiting, running = sum(load.waiting for load in loads), sum(load.running for load in loads)
        return cls(waiting, running, usage, sum(load.preemptions for load in loads))


@dataclass(slots=True, eq=False)
class ReplicaSlots:
    """One replica: it computes one batch, and may hold another shortly before. `free` is stored for speed."""

    name: str = ""
    ready_variants: frozenset[str] = NOTHING
    free: bool = False
    """Whether it can take a batch now."""
    prefetch_from: float = NEVER
    """When another batch may be sent, because the replica will be free when that arrives."""
    prefetch_timer: float = NEVER
    """The `prefetch_from` for which a timer is set."""
    ejection: str = ""
    """Why outlier detection keeps batches from it; empty if it does not."""
    overload: str = ""
    """Why the replica reports that it should get no new batches while others are ready; empty if it does not."""
    probing: bool = False
    """Whether it may take a single batch although it is ejected."""
    inflight: int = 0
    """Number of its batches."""
    last_used: int = 0
    """Sequence number of its last batch within the stage."""
    completed_at: float = float("-inf")
    """When its last batch ended."""
    transfer_seconds: float = NEVER
    """Recent round trip of a batch beyond its computation; `NEVER` until the replica reports a computation."""
    computing: Batch | None = None
    """The batch that it computes."""
    prefetched: Batch | None = None
    """The batch that waits at the replica."""
    last_point: Key = ("", "")
    """Of its last batch."""
    capacity: int = 0
    """Concurrent rows of a generation stage; else 0."""
    engine_load: EngineLoad | None = None
    """As a third-party server reported it at the last probe."""
    partial_prefill: frozenset[str] = NOTHING
    """Variants that can start a prompt before all of its images have arrived."""
    max_prompt_tokens: dict[str, int] = field(default_factory=dict)
    """Longest prompt that it accepts, by variant, as far as it reports that."""
    tasks: dict[str, Sequence[str]] = field(default_factory=dict)
    """By variant; none until it reports them."""
    task_accuracies: dict[str, Mapping[str, Mapping[str, Accuracy]]] = field(default_factory=dict)
    """Reported accuracies of registered tasks, by variant, task and point."""
    awaiting_images: set[Batch] = field(default_factory=set)
    """Batches that wait for images. They use no capacity."""
    prefilling: dict[Batch, float] = field(default_factory=dict)
    """Without a first token; their prompt tokens."""
    held_prefixes: dict[int, None] = field(default_factory=dict)
    """Hashes of leading messages that were sent to it, the latest last."""

    def accepts_prefetch(self, now: float) -> bool:
        """Return whether another batch may be sent while it computes one."""
        return self.prefetch_from <= now and bool(self.ready_variants) and not self.ejection

    @property
    def has_spare_capacity(self) -> bool:
        """Whether capacity is free, counting batches that wait for images."""
        return bool(self.ready_variants) and self.inflight < self.capacity and not self.ejection

    @property
    def concurrent_prefills(self) -> int:
        """Weights of the prompts in prefill; 0 outside generation stages."""
        return sum([batch.weight for batch in self.prefilling if batch not in self.awaiting_images])

    @property
    def has_engine_queue(self) -> bool:
        """Whether requests wait inside its engine, where deadlines do not order them."""
        return self.engine_load is not None and self.engine_load.waiting > 0

    @property
    def foreign_requests(self) -> float:
        """Requests of others at its engine."""
        load = self.engine_load
        return 0.0 if load is None else max(load.running + load.waiting - self.inflight, 0.0)

    @property
    def pending_tokens(self) -> float:
        """Tokens left to prefill, plus one for each generation, batch and prompt of unknown length."""
        return self.inflight + sum(self.prefilling.values()) - len(self.prefilling)

    def expected_free_time(self, now: float) -> float:
        if self.computing is None:
            return now
        start = max(self.computing.dispatched_at, self.completed_at)
        held = [batch for batch in (self.computing, self.prefetched) if batch is not None]
        return max(start + sum(batch.point.seconds(batch.rows) for batch in held), now)

    def observe_transfer(self, seconds: float) -> None:
        before = self.transfer_seconds
        self.transfer_seconds = seconds if before == NEVER else before + WEIGHT * (seconds - before)

    def prefetch_time(self, dispatched_at: float, expected_seconds: float) -> float:
        """Return when to send the next batch, so that it arrives as the replica becomes free.

        Only full batches are prefetched. No row could have joined them anyway, so binding stays late, and the replica
        does not idle while outputs and the next batch are transferred.
        """
        compute_seconds = expected_seconds - self.transfer_seconds
        if compute_seconds < MIN_COMPUTE_SECONDS:
            return NEVER
        found_idle = self.completed_at <= dispatched_at
        start = dispatched_at if found_idle else self.completed_at - self.transfer_seconds
        return start + compute_seconds - max(MARGIN_SECONDS, self.transfer_seconds)

    def set_ready_variants(self, variants: frozenset[str]) -> None:
        """Set the variants it can serve. The caller refreshes the scheduler."""
        self.ready_variants = variants
        self._update_free()

    def set_ejection(self, reason: str, *, probing: bool = False) -> None:
        self.ejection, self.probing = reason, probing
        self._update_free()

    def assign(self, batch: Batch, use: int) -> None:
        """Add a batch; `use` is its sequence number within the stage."""
        if self.capacity:
            self.prefilling[batch] = max(batch.tokens, 1.0)
        elif batch.found_idle:
            self.computing = batch
        else:
            self.prefetched = batch
        if batch.early_prefill:
            self.awaiting_images.add(batch)
        self.inflight += 1
        self.last_used, self.last_point = use, batch.key
        self.prefetch_from = NEVER
        self._update_free()

    def set_capacity(self, places: int) -> None:
        """Set the number of concurrent rows; running rows beyond it finish."""
        self.capacity = places
        self._update_free()

    def resume(self, batch: Batch) -> None:
        """Count a batch that waited for images: they have all arrived."""
        self.awaiting_images.discard(batch)
        self._update_free()

    def on_first_token(self, batch: Batch) -> None:
        self.prefilling.pop(batch, None)

    def _update_free(self) -> None:
        taken = self.inflight - len(self.awaiting_images)
        usable = bool(self.ready_variants) and (not self.ejection or (self.probing and not self.inflight))
        self.free = usable and (not self.inflight or taken < self.capacity)

    def release(self, batch: Batch, now: float) -> Batch | None:
        """Remove a batch; return the prefetched batch that starts computing, if any."""
        next_batch, self.prefetched = self.prefetched, None
        self.inflight -= 1
        self.awaiting_images.discard(batch)
        self.prefetch_from = NEVER
        self._update_free()
        if self.capacity:
            self.prefilling.pop(batch, None)
            return None
        self.completed_at = now
        if self.computing is not batch:
            return None
        self.computing = next_batch if self.ready_variants else None  # else it is lost with the batch before it
        return self.computing
