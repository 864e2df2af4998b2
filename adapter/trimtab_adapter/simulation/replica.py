"""A replica as the simulator sees it: what the router's binding looks at, and what its fleet keeps of it."""

from dataclasses import dataclass, field
from typing import Literal

from trimtab_pipelines.hosting import HostingGroup
from trimtab_router.work import Slice

NOTHING: frozenset[str] = frozenset()


@dataclass(slots=True)
class Machine:
    """What the replicas of all stages share: how many serve a batch right now, and how much each slows the others."""

    contention: float
    busy: int = 0

    def slowdown(self, others: int) -> float:
        """Return by what factor a batch is slower beside so many other busy replicas."""
        return 1.0 + self.contention * others


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

    `transfer_seconds` is the router's estimate, as in its own `Replica`.
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
