"""A replica as the simulator sees it: what the router's binding looks at, and what its fleet keeps of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from trimtab_adapter.simulation.speed import Speed
from trimtab_pipelines.hosting import HostingGroup
from trimtab_router.work import Slice

NOTHING: frozenset[str] = frozenset()


@dataclass(slots=True)
class Machine:
    """What all replicas share: the processors, how many replicas are busy, and how much each slows the others."""

    contention: float = 0.0
    speeds: Sequence[Speed] = ()
    busy: int = 0

    def finish(self, begin_seconds: float, work_seconds: float, others: int, processor: int) -> float:
        """Return when a batch is done beside so many other busy replicas."""
        work_seconds *= 1.0 + self.contention * others
        if not self.speeds:
            return begin_seconds + work_seconds
        return self.speeds[processor % len(self.speeds)].finish(begin_seconds, work_seconds)


@dataclass(slots=True, eq=False)
class Parcel:
    """A batch in a replica's hands; times in seconds of the simulation."""

    variant: str
    point: str
    batch: list[Slice]
    rows: int
    departed_at: float
    found_idle: bool = True
    compute_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    """One replica. `free` and `ready_variants` are kept, not computed: they are asked far more often than they change.

    `transfer_seconds` is the router's estimate, as in its own `Replica`; `processor` counts the replicas, which take
    turns with the machine's processors.
    """

    stage: str
    group: HostingGroup
    state: Literal["starting", "ready", "draining", "gone"] = "starting"
    ready_variants: frozenset[str] = NOTHING
    free: bool = False
    inflight: int = 0
    last_used: int = 0
    completed_at: float = float("-inf")
    transfer_seconds: float = 0.0
    takes_ahead: bool = False
    computing_until: float = 0.0
    processor: int = 0
    held: list[Parcel] = field(default_factory=list)

    def become_ready(self) -> None:
        """Every model of its group is loaded and warmed."""
        self.state, self.ready_variants, self.free = "ready", self.group.names, True

    def close(self, state: Literal["draining", "gone"]) -> None:
        """Take no new batch from now on."""
        self.state, self.ready_variants, self.free, self.takes_ahead = state, NOTHING, False, False

    def take(self, parcel: Parcel, use: int) -> None:
        """Hold one more batch; `use` counts the stage's batches."""
        self.held.append(parcel)
        self.inflight += 1
        self.last_used = use
        self.free = self.takes_ahead = False

    def release(self, parcel: Parcel, now: float) -> None:
        """Hold one batch less."""
        self.held.remove(parcel)
        self.inflight -= 1
        self.completed_at = now
        self.takes_ahead = False
        self.free = self.state == "ready" and not self.inflight
