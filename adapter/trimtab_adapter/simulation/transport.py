"""Simulated transport of one stage: samples each batch's service time; responses carry row counts only."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Literal

import numpy as np

from trimtab_adapter.simulation.environment import Environment, MachineSpeed
from trimtab_adapter.simulation.sampling import FanOut, ServiceTimeSampler, Uniform
from trimtab_pipelines.replica_groups import ReplicaGroup
from trimtab_pipelines.stages import EMBEDDINGS_INPUT, Stage
from trimtab_protocol.tensors import Array
from trimtab_router.scheduling.interfaces import Clock, OnEnd, StatsSink, Transport
from trimtab_router.scheduling.policies.interface import Point
from trimtab_router.scheduling.replica_slots import NOTHING, Batch, Completed, ReplicaLost, ReplicaSlots
from trimtab_router.scheduling.service_time import Key
from trimtab_router.scheduling.stage_request import RowSlice
from trimtab_router.scheduling.stage_scheduler import StageScheduler


@dataclass(slots=True)
class SimulatedMachine:
    """The shared processors, the number of busy replicas, and how much each slows the others."""

    contention: float = 0.0
    speeds: Sequence[MachineSpeed] = ()
    busy: int = 0

    def finish(self, begin_seconds: float, work_seconds: float, others: int, processor: int) -> float:
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
    in_flight: list[tuple[Batch, OnEnd]] = field(default_factory=list)
    """Batches in order of completion, each with its callback."""
    computing_until: float = 0.0
    """Completion time of the last batch."""
    loaded: str = ""
    """The last operating point."""

    def become_ready(self) -> None:
        self.state = "ready"
        self.slots.set_ready_variants(self.group.names)

    def close(self, state: Literal["draining", "gone"]) -> None:
        """Accept no new batch."""
        self.state = state
        self.slots.set_ready_variants(NOTHING)


class BatchTally(StatsSink):
    """Counts of a simulated stage's batches and rows; each result has the rest of its statistics."""

    def __init__(self) -> None:
        self.served_batches = 0
        self.rows = 0
        self.rows_by_point: Counter[Key] = Counter()
        self.escalated_rows: Counter[tuple[Key, Key]] = Counter()

    def observe_batch(self, key: Key, rows: int, seconds: float, ratio: float) -> None:  # noqa: ARG002 - of a tally
        self.served_batches += 1
        self.rows += rows
        self.rows_by_point[key] += rows

    def count_escalated_rows(self, first: Key, second: Key, rows: int) -> None:
        self.escalated_rows[first, second] += rows

    def record_policy_error(self, error: Exception) -> None:
        """Raise it: a simulated policy must be correct."""
        raise error


@lru_cache(maxsize=4096)
def counts_of(*counts: int) -> Array:
    """The rows of a counted output for each input row; must not be modified."""
    return np.array(counts)


@lru_cache(maxsize=4096)
def rows_of(count: int) -> Array:
    """An array of this many rows; only its length has a meaning."""
    return np.zeros(count, dtype=np.int8)


@lru_cache(maxsize=64)
def _references(rows: int) -> Array:
    """Placeholder references of images; no embedding is stored."""
    references = np.empty(rows, dtype=object)
    references[:] = [b"{}"] * rows
    return references


class SimulatedTransport(Transport):
    """The replicas of one stage, and their batches in flight.

    Every image is unique and all images of a chat arrive together, so no embedding is stored, fetched or sent later.
    """

    scheduler: StageScheduler
    """The scheduler whose batches it serves."""

    def __init__(
        self,
        stage: Stage,
        *,
        clock: Clock,
        times: ServiceTimeSampler,
        fan_outs: Mapping[str, FanOut],
        confidences: Uniform,
        environment: Environment,
        machine: SimulatedMachine,
        on_idle: Callable[[SimulatedReplica], None],
    ) -> None:
        self.stage = stage
        self.replicas: list[SimulatedReplica] = []
        self._clock = clock
        self._draws = times
        self._fan_outs = fan_outs
        self._whole = [output.name for output in stage.outputs if output.counted_by is None]
        self._counted = {count: [o.name for o in stage.outputs if o.counted_by == count] for count in fan_outs}
        self._encodes, self._confidence = stage.encodes, stage.confidence
        self._confidences = confidences
        self._load_seconds = environment.load_seconds
        self._machine = machine
        self._on_idle = on_idle
        self._replicas_by_slot: dict[ReplicaSlots, SimulatedReplica] = {}

    def look_around(self) -> None:
        """Pass the current replicas to the scheduler; call it after each change."""
        self._replicas_by_slot = {replica.slots: replica for replica in self.replicas}
        self.scheduler.set_replicas(list(self._replicas_by_slot))

    def send(self, batch: Batch, on_end: OnEnd) -> None:
        replica = self._replicas_by_slot[batch.replica]
        others, seconds = self._machine.busy - (not batch.found_idle), self._draws.draw(*batch.key, batch.rows)
        loading = self._load(replica, batch.point.name)
        begin = max(batch.dispatched_at, replica.computing_until) + loading
        replica.computing_until = self._machine.finish(begin, seconds, others, replica.processor)
        self._machine.busy += batch.found_idle
        replica.in_flight.append((batch, on_end))
        completed = partial(self._completed, replica, replica.computing_until - begin, loading)
        self._clock.call_at(replica.computing_until, completed)

    def share(self, batch: Batch, row: int) -> bool:  # noqa: ARG002 - of a transport
        return False

    def _load(self, replica: SimulatedReplica, point: str) -> float:
        """Seconds to load a batch's operating point; a replica's first point is loaded at its start."""
        before, replica.loaded = replica.loaded, point
        return self._load_seconds.get(point, 0.0) if before not in {"", point} else 0.0

    def lose(self, replica: SimulatedReplica) -> None:
        """Kill a replica and fail its batches."""
        replica.close("gone")
        self.replicas.remove(replica)
        self._machine.busy -= bool(replica.in_flight)
        held, replica.in_flight = replica.in_flight, []
        self.look_around()
        for batch, on_end in held:
            on_end(batch, ReplicaLost("the replica died"))

    def _completed(self, replica: SimulatedReplica, compute_seconds: float, loading_seconds: float) -> None:
        if replica.state == "gone":
            return
        batch, on_end = replica.in_flight.pop(0)
        self._machine.busy -= not replica.in_flight
        waited = loading_seconds or None
        on_end(batch, Completed(self._outputs(batch), batch.point.name, compute_seconds, waited))
        if replica.state == "draining" and not replica.in_flight:
            self._on_idle(replica)

    def _outputs(self, batch: Batch) -> Sequence[Mapping[str, Array]]:
        """The outputs of each member; cancelled ones sample nothing."""
        return [{} if piece.request.closed else self._rows_out(piece, batch.point) for piece in batch.row_slices]

    def _rows_out(self, piece: RowSlice, point: Point) -> Mapping[str, Array]:
        rows = piece.rows
        given = dict.fromkeys(self._whole, rows_of(rows))
        for count, fan_out in self._fan_outs.items():
            counts = fan_out.draw(rows)
            given |= dict.fromkeys(self._counted[count], rows_of(sum(counts)))
            given[count] = counts_of(*counts)
        if self._encodes:
            given[EMBEDDINGS_INPUT] = _references(rows)
        if self._confidence is not None:
            task = piece.request.options.task
            given[self._confidence] = simulated_confidences(point, task, self._confidences.draw(rows))
        return given


def simulated_confidences(point: Point, task: str, drawn: Array) -> Array:
    """Confidences of a task's rows: interpolated through the escalation thresholds of the point."""
    if not point.escalations:
        return drawn
    # Those measured on the task; that of all rows without one.
    measured = [escalation.by_task.get(task, escalation) for escalation in point.escalations]
    known = sorted({(own.share, own.confidence_below) for own in measured if own.share < 1})
    shares, belows = ([0.0, *(pair[n] for pair in known), 1.0] for n in (0, 1))
    confidences: Array = np.interp(drawn, shares, belows)
    return confidences
