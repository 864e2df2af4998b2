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
    """A batch on its way; times in seconds of the desk's clock. Nobody changes it.

    Attributes:
        slot: where it goes.
        variant: what runs it.
        point: the operating point asked for.
        batch: its members.
        rows: of all members.
        departed_at: when it left.
        found_idle: whether its replica had nothing else to do.
        again: which of its rows are to be looked at again; None: none.
        beside: where answers are written piece by piece, how many prompts its replica read when it left.
        early: whether it left before all that it reads was there.
        riders: rows that get the same answers as some of its own, in the order in which they came.
    """

    slot: "ReplicaSlots"
    variant: str
    point: Point
    batch: Sequence[RowSlice]
    rows: int
    departed_at: float
    found_idle: bool
    again: EscalationRule | None = None
    early: bool = False
    beside: int = 0
    riders: list[RowSlice] = field(default_factory=list)

    @property
    def tokens(self) -> float:
        """How many tokens the prompts of its rows are predicted to have; 0 where nobody knows."""
        return sum([piece.tokens for piece in self.batch]) if self.batch[0].work.tokens else 0.0

    @property
    def prefill_seconds(self) -> float:
        """What its longest prompt takes to be read beyond what is predicted for all."""
        return max([piece.work.prefill_seconds for piece in self.batch])

    @property
    def key(self) -> Key:
        """What it runs: variant and operating point."""
        return self.variant, self.point.name

    def promise(self, piece: RowSlice, sign: int = 1) -> None:
        """Note what is expected of a member, or take it back; only floors ask."""
        if not piece.work.accuracy_floor:
            return
        piece.work.promised += sign * self._promises(piece)
        if piece.provisional is None:
            piece.work.promised_rows += sign * piece.rows

    def _promises(self, piece: RowSlice) -> float:
        """How many more of a work's rows are expected to be right once this member has been served."""
        before = piece.provisional.accuracy if piece.provisional is not None else 0.0
        if piece.again is not None and piece.again.accuracy is not None:
            return 0.0  # promised when they left for the first time
        if self.again is not None and self.again.accuracy is not None:
            return self.again.accuracy * piece.rows
        return (self.point.accuracy_for(piece.work.wish.task) - before) * piece.rows


@dataclass(slots=True, eq=False)
class ReplicaSlots:
    """One replica: it computes one batch at a time, and may hold a second, full one just before it is free.

    `free` and `ready_variants` are kept, not computed: they are asked far more often than they change.

    Attributes:
        name: of the replica.
        ready_variants: what it can serve now.
        free: whether it can take a batch now.
        takes_ahead: whether it may be sent a second batch, because it will be free by the time that one arrives.
        inflight: batches in its hands.
        last_used: the count of the stage's batches when it got its last one.
        completed_at: when its last batch ended.
        transfer_seconds: what a batch takes there and back beyond its computing, as seen lately.
        computing: the batch it computes.
        ahead: the batch that waits there.
        point: the operating point of the batch it got last.
        places: where its stage writes answers piece by piece, how many rows it writes side by side; else 0.
        reads_ahead: the variants that begin on a prompt before all that it reads is there.
        tasks: by variant, the tasks that it tells of, by number; absent where it told nothing yet.
        judged: by variant, how accurate it says its points are on tasks that joined, by task and point.
        waiting: of what it has in its hands, what waits for the rest of what it reads: it takes no place from others.
        reading: of what it has in its hands, the rows whose answers have not begun, and the tokens of their prompts.
    """

    name: str = ""
    ready_variants: frozenset[str] = NOTHING
    free: bool = False
    takes_ahead: bool = False
    inflight: int = 0
    last_used: int = 0
    completed_at: float = float("-inf")
    transfer_seconds: float = 0.0
    computing: Batch | None = None
    ahead: Batch | None = None
    point: str = ""
    places: int = 0
    reads_ahead: frozenset[str] = NOTHING
    tasks: dict[str, Sequence[str]] = field(default_factory=dict)
    judged: dict[str, Mapping[str, Mapping[str, Accuracy]]] = field(default_factory=dict)
    waiting: set[Batch] = field(default_factory=set)
    reading: dict[Batch, float] = field(default_factory=dict)

    @property
    def spare(self) -> bool:
        """Whether a place is free that nothing in its hands takes, or soon will."""
        return bool(self.ready_variants) and self.inflight < self.places

    @property
    def company(self) -> int:
        """How many prompts it reads before one more; 0 where it computes batches."""
        return len(self.reading) - len(self.waiting)

    @property
    def pending_tokens(self) -> float:
        """Tokens that its next steps compute: of prompts that are not read, and one of each answer that is written.

        A batch, and a prompt of which nothing is known, count as one token.
        """
        return self.inflight + (sum(self.reading.values()) - len(self.reading) if self.reading else 0)

    def offer(self, variants: frozenset[str]) -> None:
        """Serve these from now on. Whoever calls tells the desk to look around."""
        self.ready_variants = variants
        self._settle()
        self.takes_ahead = self.takes_ahead and bool(variants)

    def take(self, parcel: Batch, use: int) -> None:
        """Hold one more batch; `use` counts the stage's batches."""
        if self.places:
            self.reading[parcel] = max(parcel.tokens, 1.0)
        elif parcel.found_idle:
            self.computing = parcel
        else:
            self.ahead = parcel
        if parcel.early:
            self.waiting.add(parcel)
        self.inflight += 1
        self.last_used, self.point = use, parcel.point.name
        self.takes_ahead = False
        self._settle()

    def set_capacity(self, places: int) -> None:
        """Write so many rows side by side from now on; those beyond them finish."""
        self.places = places
        self._settle()

    def go_on(self, parcel: Batch) -> None:
        """One that waited has all that it reads."""
        self.waiting.discard(parcel)
        self._settle()

    def begun(self, parcel: Batch) -> None:
        """The answer of one begins: its prompt is read."""
        self.reading.pop(parcel, None)

    def _settle(self) -> None:
        taken = self.inflight - len(self.waiting)
        self.free = bool(self.ready_variants) and (not self.inflight or taken < self.places)

    def release(self, parcel: Batch, now: float) -> Batch | None:
        """Hold one batch less; returns the one that it computes from now on instead."""
        follower, self.ahead = self.ahead, None
        self.inflight -= 1
        self.waiting.discard(parcel)
        self.takes_ahead = False
        self._settle()
        if self.places:
            self.reading.pop(parcel, None)
            return None
        self.completed_at = now
        if self.computing is not parcel:
            return None
        self.computing = follower if self.ready_variants else None  # else it is lost with the batch it waited for
        return self.computing
