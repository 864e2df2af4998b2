"""A simulated replica, and the machine that all replicas share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from trimtab_adapter.simulation.machine_speed import MachineSpeed
from trimtab_pipelines.replica_groups import ReplicaGroup
from trimtab_router.scheduling.batch_outcomes import BatchOutcome
from trimtab_router.scheduling.replica_slots import NOTHING, Batch, ReplicaSlots


@dataclass(slots=True)
class SimulatedMachine:
    """The shared processors, the number of busy replicas, and how much each slows the others."""

    contention: float = 0.0
    speeds: Sequence[MachineSpeed] = ()
    busy: int = 0

    def finish(self, begin_seconds: float, work_seconds: float, others: int, processor: int) -> float:
        """The completion time of a batch alongside `others` busy replicas."""
        work_seconds *= 1.0 + self.contention * others
        if not self.speeds:
            return begin_seconds + work_seconds
        return self.speeds[processor % len(self.speeds)].finish(begin_seconds, work_seconds)


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    """One replica; `processor` is its number, which selects a processor in turn."""

    stage: str
    group: ReplicaGroup
    state: Literal["starting", "ready", "draining", "gone"] = "starting"
    processor: int = 0
    slots: ReplicaSlots = field(default_factory=ReplicaSlots)
    """The replica as its stage's scheduler sees it."""
    in_flight: list[tuple[Batch, Callable[[Batch, BatchOutcome], None]]] = field(default_factory=list)
    """Batches in order of completion, each with its callback."""
    computing_until: float = 0.0
    """Completion time of the last batch."""
    loaded: str = ""
    """The last operating point."""

    @property
    def in_flight_count(self) -> int:
        return len(self.in_flight)

    def become_ready(self) -> None:
        """Every model of its group is loaded."""
        self.state = "ready"
        self.slots.set_ready_variants(self.group.names)

    def close(self, state: Literal["draining", "gone"]) -> None:
        """Accept no new batch."""
        self.state = state
        self.slots.set_ready_variants(NOTHING)
