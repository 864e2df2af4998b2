"""Who holds what of a pool: plain notes, kept by `sharing` under its lock."""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from trimtab_adapter.planning.pool_allocation import PoolDemand
from trimtab_adapter.planning.relaxation import PlanSolution
from trimtab_adapter.solvers.program import TOLERANCE
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.pool import Pool
from trimtab_pipelines.spec import InferencePipeline

Room = tuple[float, int]  # cores and GPUs
NOTHING: Room = (0.0, 0)


@dataclass(slots=True)
class PoolMember:
    """What a pipeline holds of a pool, how to have it decide again, and its latest wish, if it decides."""

    held: Room
    wake: Callable[[], None]
    asked: PoolDemand | None = None


@dataclass(slots=True)
class PoolLedger:
    """A pool and who sits at it."""

    pool: Pool
    seats: dict[str, PoolMember] = field(default_factory=dict)
    deciding: threading.Lock = field(default_factory=threading.Lock)  # one decision of a pool at a time

    def left(self, key: str) -> Pool:
        """What those that do not decide leave of the pool to who decides, and to a pipeline that asks now."""
        fixed = [seat.held for other, seat in self.seats.items() if seat.asked is None and other != key]
        cores = max(self.pool.cores - sum(held[0] for held in fixed), TOLERANCE)
        return self.pool.model_copy(
            update={"cores": cores, "gpus": max(self.pool.gpus - sum(held[1] for held in fixed), 0)}
        )

    def held(self, key: str) -> Room:
        """What a pipeline holds; nothing where it does not sit here."""
        return self.seats[key].held if key in self.seats else NOTHING

    def room(self, key: str) -> Room:
        """What a pipeline may take now: what the others do not hold, and at least what is its own."""
        others = [seat.held for other, seat in self.seats.items() if other != key]
        own_cores, own_gpus = self.held(key)
        cores = max(self.pool.cores - sum(held[0] for held in others), own_cores)
        return cores, max(self.pool.gpus - sum(held[1] for held in others), own_gpus)

    def wishes(self) -> dict[str, PoolDemand]:
        """What those ask that decide."""
        return {key: seat.asked for key, seat in self.seats.items() if seat.asked is not None}

    def note(self, key: str, held: Room, wake: Callable[[], None]) -> None:
        """Note what a pipeline holds whose plan others write; where that changes what is left, others decide anew."""
        seat = self.seats.get(key)
        changed = seat is None or seat.asked is not None or seat.held != held
        self.seats[key] = PoolMember(held, wake)
        if changed:
            notify_members(other for name, other in self.seats.items() if name != key)

    def stop_deciding(self, key: str) -> None:
        """Leave a pipeline what it holds until it asks anew."""
        if key in self.seats:
            self.seats[key].asked = None

    def wake_those_due(self, key: str, joint: Mapping[str, PlanSolution]) -> None:
        """Have the others decide whose part of the joint plan is not what they hold."""
        notify_members(
            self.seats[other]
            for other, part in joint.items()
            if other != key and other in self.seats and needs(part) != self.seats[other].held
        )


def may_join(pool: Pool, pipeline: InferencePipeline) -> bool:
    """Whether a pool is for the namespace of a pipeline."""
    return not pool.namespaces or pipeline.metadata.namespace in pool.namespaces


def fits(used: Room, room: Room) -> bool:
    """Whether so much finds room."""
    return used[0] <= room[0] + TOLERANCE and used[1] <= room[1]


def needs(part: PlanSolution) -> Room:
    """What all replicas of an answer ask for."""
    choice = part.solution.choice
    return sum(option.cores for option in choice), sum(option.gpus for option in choice)


def uses(plan: PipelinePlan | None, pipeline: InferencePipeline) -> Room:
    """What all replicas of a plan ask for, whoever wrote it; nothing where there is none."""
    if plan is None:
        return NOTHING
    gpus = {(stage.name, each.name): each.resources.gpu for stage in pipeline.spec.stages for each in stage.variants}
    running = plan.spec.stages
    cores = sum(stage.replicas * stage.cores for stage in running)
    return cores, sum(stage.replicas * gpus.get((stage.name, stage.variant), 0) for stage in running)


def notify_members(seats: Iterable[PoolMember]) -> None:
    """Have them decide again."""
    for seat in seats:
        seat.wake()
