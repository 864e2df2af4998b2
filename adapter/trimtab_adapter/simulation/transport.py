"""Carries the batches of one simulated stage: what a batch takes is drawn; of what it gives only the rows count."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import numpy as np

from trimtab_adapter.simulation.replica import Machine, SimulatedReplica
from trimtab_adapter.simulation.sampling import FanOut, ServiceTimeSampler
from trimtab_pipelines.escalation import TaskEscalation
from trimtab_pipelines.stages import EMBEDDINGS_INPUT, Stage
from trimtab_protocol.tensors import Array
from trimtab_router.scheduling.batch_outcomes import Completed, Ending, ReplicaLost
from trimtab_router.scheduling.interfaces import Clock
from trimtab_router.scheduling.policies.interface import Escalation, Point
from trimtab_router.scheduling.replica_slots import Batch, ReplicaSlots
from trimtab_router.scheduling.service_time import Key
from trimtab_router.scheduling.stage_request import RowSlice
from trimtab_router.scheduling.stage_scheduler import StageScheduler

Ended = Callable[[Batch, Ending], None]


class Batches:
    """The tally of a simulated stage: how many batches were served, and their rows."""

    def __init__(self) -> None:
        self.served_batches = 0
        self.rows = 0
        self.rows_by_point: Counter[str] = Counter()
        self.rows_again = 0

    def waited(self, seconds: float) -> None:
        """Every answer tells it."""

    def served(self, key: Key, rows: int, seconds: float, ratio: float) -> None:  # noqa: ARG002 - of a tally
        """Count a batch."""
        self.served_batches += 1
        self.rows += rows
        self.rows_by_point[key[1]] += rows

    def looks_again(self, rows: int) -> None:
        """Count rows that go back for a better answer."""
        self.rows_again += rows

    def shared(self, how: str) -> None:
        """No two images are the same."""

    def began_early(self) -> None:
        """All images of a chat come at once."""

    def retried(self, reason: str) -> None:
        """Nobody asks."""

    def abandoned(self) -> None:
        """Nobody hangs up."""

    def undecided(self, error: Exception) -> None:
        """Whoever simulates a policy learns what is wrong with it."""
        raise error

    def troubled(self, message: str) -> None:
        """Whoever simulates trouble knows of it."""

    def failed(self, request_id: str, message: str) -> None:
        """Every request tells how it ended."""


@lru_cache(maxsize=4096)
def rows_of(count: int) -> Array:
    """An array of so many rows; only its length means anything."""
    return np.zeros(count, dtype=np.int8)


@lru_cache(maxsize=64)
def _references(rows: int) -> Array:
    """What is told of so many images, of which nothing is kept."""
    told = np.empty(rows, dtype=object)
    told[:] = [b"{}"] * rows
    return told


class SimulatedTransport:
    """The replicas of one stage, and the batches in their hands.

    Args:
        stage: the stage.
        clock: the clock.
        times: draws the seconds of its batches.
        fan_outs: draws the rows of its counted outputs, by the name of the count.
        confidences: draws how certain the model is of each row, where the stage tells it: as second looks were
            measured to find it, else evenly from 0 to 1.
        transfer_seconds: of each service time, what passes on the way.
        load_seconds: of operating points that are models of their own.
        machine: that all stages share.
        on_idle: called when a replica that drains has no batch left.
    """

    desk: StageScheduler
    """Whose batches it carries; it is told of every replica."""

    def __init__(
        self,
        stage: Stage,
        *,
        clock: Clock,
        times: ServiceTimeSampler,
        fan_outs: Mapping[str, FanOut],
        confidences: np.random.Generator,
        transfer_seconds: float,
        load_seconds: Mapping[str, float],
        machine: Machine,
        on_idle: Callable[[SimulatedReplica], None],
    ) -> None:
        self.stage = stage
        self.replicas: list[SimulatedReplica] = []
        self._clock = clock
        self._draws = times
        self._fan_outs = fan_outs
        self._whole = [output.name for output in stage.outputs if output.counted_by is None]
        self._counted = {count: [o.name for o in stage.outputs if o.counted_by == count] for count in fan_outs}
        self._confidences = confidences
        self._transfer_seconds = transfer_seconds
        self._load_seconds = load_seconds
        self._machine = machine
        self._on_idle = on_idle
        self._by_slot: dict[ReplicaSlots, SimulatedReplica] = {}

    def look_around(self) -> None:
        """Tell the desk which replicas there are: call it whenever one came, went or closed."""
        self._by_slot = {replica.slot: replica for replica in self.replicas}
        self.desk.set_replicas(list(self._by_slot))

    def carry(self, parcel: Batch, ended: Ended) -> None:
        """Draw when the batch is done."""
        replica = self._by_slot[parcel.slot]
        one_way, others = self._transfer_seconds / 2.0, self._machine.busy - (not parcel.found_idle)
        seconds = self._draws.draw(*parcel.key, parcel.rows) - self._transfer_seconds
        loading = self._load(replica, parcel.point.name)
        begin = max(parcel.departed_at + one_way, replica.computing_until) + loading
        replica.computing_until = self._machine.finish(begin, max(seconds, 0.0), others, replica.processor)
        self._machine.busy += parcel.found_idle
        replica.held.append((parcel, ended))
        completed = partial(self._completed, replica, replica.computing_until - begin, loading)
        self._clock.at(replica.computing_until + one_way, completed)

    def share(self, parcel: Batch, row: int) -> bool:  # noqa: ARG002 - of a keeper
        """Nothing is kept: each image is one that nobody else shows."""
        return False

    def fetch(
        self, slot: ReplicaSlots, variant: str, piece: RowSlice, came: Callable[[Mapping[str, Array] | None], None]
    ) -> None:
        """Nothing is kept."""

    def forget(self, references: Array) -> None:
        """Nothing is kept."""

    def _load(self, replica: SimulatedReplica, point: str) -> float:
        """Seconds to load what a batch runs; a replica that has run nothing yet came with it."""
        before, replica.loaded = replica.loaded, point
        return self._load_seconds.get(point, 0.0) if before not in {"", point} else 0.0

    def lose(self, replica: SimulatedReplica) -> None:
        """A replica died with all that it held."""
        replica.close("gone")
        self.replicas.remove(replica)
        self._machine.busy -= bool(replica.held)
        held, replica.held = replica.held, []
        self.look_around()
        for parcel, ended in held:
            ended(parcel, ReplicaLost("the replica died"))

    def _completed(self, replica: SimulatedReplica, compute_seconds: float, loading_seconds: float) -> None:
        if replica.state == "gone":
            return
        parcel, ended = replica.held.pop(0)
        self._machine.busy -= not replica.held
        waited = loading_seconds or None
        ended(parcel, Completed(self._outputs(parcel), parcel.point.name, compute_seconds, waited))
        if replica.state == "draining" and not replica.held:
            self._on_idle(replica)

    def _outputs(self, parcel: Batch) -> Sequence[Mapping[str, Array]]:
        """What each member gets; whoever left draws nothing."""
        return [{} if piece.work.closed else self._rows_out(piece, parcel.point) for piece in parcel.batch]

    def _rows_out(self, piece: RowSlice, point: Point) -> Mapping[str, Array]:
        rows = piece.rows
        given = dict.fromkeys(self._whole, rows_of(rows))
        for count, fan_out in self._fan_outs.items():
            given |= dict.fromkeys(self._counted[count], rows_of(fan_out.draw(rows)))
        if self.stage.encodes:
            given[EMBEDDINGS_INPUT] = _references(rows)
        if self.stage.confidence is not None:
            given[self.stage.confidence] = _confidences(point, piece.work.wish.task, self._confidences.random(rows))
        return given


def _confidences(point: Point, task: str, drawn: Array) -> Array:
    """How certain a point is of a task's rows, a share of which is less certain: through its looks' thresholds."""
    if not point.looks:
        return drawn
    known = sorted({(own.share, own.confidence_below) for look in point.looks if (own := _own(look, task)).share < 1})
    shares, belows = ([0.0, *(pair[n] for pair in known), 1.0] for n in (0, 1))
    confidences: Array = np.interp(drawn, shares, belows)
    return confidences


def _own(look: Escalation, task: str) -> Escalation | TaskEscalation:
    """What was measured of the rows of a task; of all where nothing was."""
    return look.by_task.get(task, look)
