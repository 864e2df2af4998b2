"""`PoolLedger`: the cores and GPUs each pipeline of a pool has; `PoolPlanner` guards it with its lock."""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from trimtab_adapter.planning.pool_allocation import PoolDemand
from trimtab_adapter.planning.relaxation import PlanSolution
from trimtab_adapter.solvers.program import TOLERANCE
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.shared_capacity import Pool
from trimtab_pipelines.spec import InferencePipeline

ResourceAmount = tuple[float, int]
NO_RESOURCES: ResourceAmount = (0.0, 0)


@dataclass(slots=True)
class PoolMember:
    """A pipeline's allocation, a callback that triggers its next decision, and its latest demand if it decides."""

    allocated: ResourceAmount
    wake: Callable[[], None]
    demand: PoolDemand | None = None


@dataclass(slots=True)
class PoolLedger:
    """A pool and the pipelines in it."""

    pool: Pool
    members: dict[str, PoolMember] = field(default_factory=dict)
    decision_lock: threading.Lock = field(default_factory=threading.Lock)
    """One decision of a pool at a time."""

    def available(self, key: str) -> Pool:
        """The pool without the allocations of pipelines that do not decide, except `key`."""
        fixed = [member.allocated for other, member in self.members.items() if member.demand is None and other != key]
        cores = max(self.pool.cores - sum(held[0] for held in fixed), TOLERANCE)
        return self.pool.model_copy(
            update={"cores": cores, "gpus": max(self.pool.gpus - sum(held[1] for held in fixed), 0)}
        )

    def allocated(self, key: str) -> ResourceAmount:
        """The allocation of a pipeline; nothing if it is not in the pool."""
        return self.members[key].allocated if key in self.members else NO_RESOURCES

    def room(self, key: str) -> ResourceAmount:
        """What a pipeline may take now: all that other pipelines do not have, and at least its own allocation."""
        others = [member.allocated for other, member in self.members.items() if other != key]
        own_cores, own_gpus = self.allocated(key)
        cores = max(self.pool.cores - sum(held[0] for held in others), own_cores)
        return cores, max(self.pool.gpus - sum(held[1] for held in others), own_gpus)

    def demands(self) -> dict[str, PoolDemand]:
        """The demands of the pipelines that decide."""
        return {key: member.demand for key, member in self.members.items() if member.demand is not None}

    def record_usage(self, key: str, held: ResourceAmount, wake: Callable[[], None]) -> None:
        """Record the allocation of a pipeline whose plans are written elsewhere; wake the others if it changed."""
        member = self.members.get(key)
        changed = member is None or member.demand is not None or member.allocated != held
        self.members[key] = PoolMember(held, wake)
        if changed:
            notify_members(other for name, other in self.members.items() if name != key)

    def withdraw_demand(self, key: str) -> None:
        """Keep a pipeline's allocation until it decides again."""
        if key in self.members:
            self.members[key].demand = None

    def notify_due_members(self, key: str, joint: Mapping[str, PlanSolution]) -> None:
        """Wake the pipelines whose part of the joint plan differs from their allocation."""
        notify_members(
            self.members[other]
            for other, part in joint.items()
            if other != key and other in self.members and solution_resources(part) != self.members[other].allocated
        )


def may_join(pool: Pool, pipeline: InferencePipeline) -> bool:
    """Whether a pool admits the namespace of a pipeline."""
    return not pool.namespaces or pipeline.metadata.namespace in pool.namespaces


def fits(used: ResourceAmount, room: ResourceAmount) -> bool:
    return used[0] <= room[0] + TOLERANCE and used[1] <= room[1]


def solution_resources(part: PlanSolution) -> ResourceAmount:
    """Resources of all replicas of a solution."""
    choice = part.solution.choice
    return sum(option.cores for option in choice), sum(option.gpus for option in choice)


def plan_resources(plan: PipelinePlan | None, pipeline: InferencePipeline) -> ResourceAmount:
    """Resources of all replicas of a plan; nothing if there is none."""
    if plan is None:
        return NO_RESOURCES
    gpus = {(stage.name, each.name): each.resources.gpu for stage in pipeline.spec.stages for each in stage.variants}
    running = plan.spec.stages
    cores = sum(stage.replicas * stage.cores for stage in running)
    return cores, sum(stage.replicas * gpus.get((stage.name, stage.variant), 0) for stage in running)


def notify_members(members: Iterable[PoolMember]) -> None:
    for member in members:
        member.wake()
