"""Where batches go: a replica as its stage sees it, and the batches in its hands. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_router.scheduling.policies.interface import Point
from trimtab_router.scheduling.service_time import Key
from trimtab_router.scheduling.stage_request import EscalationRule, RowSlice

NOTHING: frozenset[str] = frozenset()


@dataclass(slots=True, eq=False)  # not frozen, which costs as much as all else about making one
class Batch:
    """A batch on its way; times in seconds of the desk's clock. Nobody changes it."""

    replica: "ReplicaSlots"
    """Where it goes."""
    variant: str
    """What runs it."""
    point: Point
    """The operating point asked for."""
    row_slices: Sequence[RowSlice]
    """Its members."""
    rows: int
    """Of all members."""
    dispatched_at: float
    """When it left."""
    found_idle: bool
    """Whether its replica had nothing else to do."""
    escalation: EscalationRule | None = None
    """Which of its rows are to be looked at again; None: none."""
    early_prefill: bool = False
    """Whether it left before all that it reads was there."""
    concurrent_prefills: int = 0
    """Where answers are written piece by piece, how many prompts its replica read when it left."""
    joined_rows: list[RowSlice] = field(default_factory=list)
    """Rows that get the same answers as some of its own, in the order in which they came."""

    @property
    def tokens(self) -> float:
        """How many tokens the prompts of its rows are predicted to have; 0 where nobody knows."""
        return (
            sum([row_slice.tokens for row_slice in self.row_slices])
            if self.row_slices[0].request.prompt_tokens
            else 0.0
        )

    @property
    def prefill_seconds(self) -> float:
        """What its longest prompt takes to be read beyond what is predicted for all."""
        return max([row_slice.request.prefill_seconds for row_slice in self.row_slices])

    @property
    def key(self) -> Key:
        """What it runs: variant and operating point."""
        return self.variant, self.point.name

    def note_expected_correct(self, row_slice: RowSlice, sign: int = 1) -> None:
        """Note what is expected of a member, or take it back; only floors ask."""
        if not row_slice.request.accuracy_floor:
            return
        row_slice.request.expected_correct += sign * self._promises(row_slice)
        if row_slice.provisional_response is None:
            row_slice.request.dispatched_rows += sign * row_slice.rows

    def _promises(self, row_slice: RowSlice) -> float:
        """How many more of a work's rows are expected to be right once this member has been served."""
        before = row_slice.provisional_response.accuracy if row_slice.provisional_response is not None else 0.0
        if row_slice.escalation is not None and row_slice.escalation.accuracy is not None:
            return 0.0  # promised when they left for the first time
        if self.escalation is not None and self.escalation.accuracy is not None:
            return self.escalation.accuracy * row_slice.rows
        return (self.point.accuracy_for(row_slice.request.options.task) - before) * row_slice.rows


@dataclass(slots=True, eq=False)
class ReplicaSlots:
    """One replica: it computes one batch at a time, and may hold a second, full one just before it is free.

    `free` and `ready_variants` are kept, not computed: they are asked far more often than they change.
    """

    name: str = ""
    """Of the replica."""
    ready_variants: frozenset[str] = NOTHING
    """What it can serve now."""
    free: bool = False
    """Whether it can take a batch now."""
    accepts_prefetch: bool = False
    """Whether it may be sent a second batch, because it will be free by the time that one arrives."""
    inflight: int = 0
    """Batches in its hands."""
    last_used: int = 0
    """The count of the stage's batches when it got its last one."""
    completed_at: float = float("-inf")
    """When its last batch ended."""
    transfer_seconds: float = 0.0
    """What a batch takes there and back beyond its computing, as seen lately."""
    computing: Batch | None = None
    """The batch it computes."""
    prefetched: Batch | None = None
    """The batch that waits there."""
    last_point: str = ""
    """The operating point of the batch it got last."""
    capacity: int = 0
    """Where its stage writes answers piece by piece, how many rows it writes side by side; else 0."""
    partial_prefill: frozenset[str] = NOTHING
    """The variants that begin on a prompt before all that it reads is there."""
    tasks: dict[str, Sequence[str]] = field(default_factory=dict)
    """By variant, the tasks that it tells of, by number; absent where it told nothing yet."""
    task_accuracies: dict[str, Mapping[str, Mapping[str, Accuracy]]] = field(default_factory=dict)
    """By variant, how accurate it says its points are on tasks that joined, by task and point."""
    awaiting_images: set[Batch] = field(default_factory=set)
    """Of what it has in its hands, what waits for the rest of what it reads: it takes no place from others."""
    prefilling: dict[Batch, float] = field(default_factory=dict)
    """Of what it has in its hands, the rows whose answers have not begun, and the tokens of their prompts."""

    @property
    def has_spare_capacity(self) -> bool:
        """Whether a place is free that nothing in its hands takes, or soon will."""
        return bool(self.ready_variants) and self.inflight < self.capacity

    @property
    def concurrent_prefills(self) -> int:
        """How many prompts it reads before one more; 0 where it computes batches."""
        return len(self.prefilling) - len(self.awaiting_images)

    @property
    def pending_tokens(self) -> float:
        """Tokens that its next steps compute: of prompts that are not read, and one of each answer that is written.

        A batch, and a prompt of which nothing is known, count as one token.
        """
        return self.inflight + (sum(self.prefilling.values()) - len(self.prefilling) if self.prefilling else 0)

    def set_ready_variants(self, variants: frozenset[str]) -> None:
        """Serve these from now on. Whoever calls tells the desk to look around."""
        self.ready_variants = variants
        self._settle()
        self.accepts_prefetch = self.accepts_prefetch and bool(variants)

    def assign(self, batch: Batch, use: int) -> None:
        """Hold one more batch; `use` counts the stage's batches."""
        if self.capacity:
            self.prefilling[batch] = max(batch.tokens, 1.0)
        elif batch.found_idle:
            self.computing = batch
        else:
            self.prefetched = batch
        if batch.early_prefill:
            self.awaiting_images.add(batch)
        self.inflight += 1
        self.last_used, self.last_point = use, batch.point.name
        self.accepts_prefetch = False
        self._settle()

    def set_capacity(self, places: int) -> None:
        """Write so many rows side by side from now on; those beyond them finish."""
        self.capacity = places
        self._settle()

    def resume(self, batch: Batch) -> None:
        """One that waited has all that it reads."""
        self.awaiting_images.discard(batch)
        self._settle()

    def on_first_token(self, batch: Batch) -> None:
        """The answer of one begins: its prompt is read."""
        self.prefilling.pop(batch, None)

    def _settle(self) -> None:
        taken = self.inflight - len(self.awaiting_images)
        self.free = bool(self.ready_variants) and (not self.inflight or taken < self.capacity)

    def release(self, batch: Batch, now: float) -> Batch | None:
        """Hold one batch less; returns the one that it computes from now on instead."""
        follower, self.prefetched = self.prefetched, None
        self.inflight -= 1
        self.awaiting_images.discard(batch)
        self.accepts_prefetch = False
        self._settle()
        if self.capacity:
            self.prefilling.pop(batch, None)
            return None
        self.completed_at = now
        if self.computing is not batch:
            return None
        self.computing = follower if self.ready_variants else None  # else it is lost with the batch it waited for
        return self.computing
