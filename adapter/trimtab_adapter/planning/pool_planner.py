"""`PoolPlanner`: plans pipelines of one pool that tick at different times.

Every decision is made for all pipelines, and one pipeline's part is returned. A pipeline entitled to more waits until
others release it; they are woken, and the pool is never exceeded. A pipeline that does not decide (Advisory, Paused,
without profiles, or not yet since the adapter started) keeps its allocation and delays no other: a proposal is what it
would get if it decided, and takes nothing. Nothing is stored: the plans in force and the operator's status define the
allocations.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from trimtab_adapter.planning.decide import Planner, PlanningInputs, build_plan, decide, planning_problem
from trimtab_adapter.planning.planning_problem import PlanningError
from trimtab_adapter.planning.pool_allocation import PlanRequest, PoolDemand, limit_budget, split_pool
from trimtab_adapter.planning.relaxation import PlanSolution
from trimtab_adapter.solvers.program import TOLERANCE
from trimtab_adapter.solvers.time_limit import time_limit
from trimtab_pipelines.plan import PipelinePlan, plan_capacity
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.quantity import parse_quantity
from trimtab_pipelines.spec import InferencePipeline, Pool

ResourceAmount = tuple[float, int]
NO_RESOURCES: ResourceAmount = (0.0, 0)


@dataclass(slots=True)
class PoolMember:
    """A pipeline's allocation, a callback that triggers its next decision, and its latest demand if it decides."""

    allocated: ResourceAmount
    wake: Callable[[], object]
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
        cores, gpus = _allocated(m for other, m in self.members.items() if m.demand is None and other != key)
        left = {"cores": max(self.pool.cores - cores, TOLERANCE), "gpus": max(self.pool.gpus - gpus, 0)}
        return self.pool.replace(**left)

    def allocated(self, key: str) -> ResourceAmount:
        return self.members[key].allocated if key in self.members else NO_RESOURCES

    def room(self, key: str) -> ResourceAmount:
        """What a pipeline may take now: all that other pipelines do not have, and at least its own allocation."""
        cores, gpus = _allocated(member for other, member in self.members.items() if other != key)
        own_cores, own_gpus = self.allocated(key)
        return max(self.pool.cores - cores, own_cores), max(self.pool.gpus - gpus, own_gpus)

    def record_usage(self, key: str, held: ResourceAmount, wake: Callable[[], object]) -> None:
        """Record the allocation of a pipeline whose plans are written elsewhere; wake the others if it changed."""
        member = self.members.get(key)
        changed = member is None or member.demand is not None or member.allocated != held
        self.members[key] = PoolMember(held, wake)
        if changed:
            notify_members(other for name, other in self.members.items() if name != key)

    def notify_due_members(self, key: str, joint: Mapping[str, PlanSolution]) -> None:
        """Wake the pipelines whose part of the joint plan differs from their allocation."""
        notify_members(
            self.members[other]
            for other, part in joint.items()
            if other != key and other in self.members and solution_resources(part) != self.members[other].allocated
        )


def _allocated(members: Iterable[PoolMember]) -> ResourceAmount:
    held = [member.allocated for member in members]
    return sum(cores for cores, _ in held), sum(gpus for _, gpus in held)


def may_join(pool: Pool, pipeline: InferencePipeline) -> bool:
    return not pool.namespaces or pipeline.metadata.namespace in pool.namespaces


def fits(used: ResourceAmount, room: ResourceAmount) -> bool:
    return used[0] <= room[0] + TOLERANCE and used[1] <= room[1]


def solution_resources(part: PlanSolution) -> ResourceAmount:
    return part.solution.cores, part.solution.gpus


def plan_resources(plan: PipelinePlan, pipeline: InferencePipeline) -> ResourceAmount:
    """Resources of all replicas of a plan, at most the pipeline's budget."""
    requested, budget = plan_capacity(plan, pipeline.spec), pipeline.spec.budget
    return min(requested.cores, budget.cores), min(requested.gpus, budget.gpus)


def held_resources(plan: PipelinePlan | None, pipeline: InferencePipeline) -> ResourceAmount:
    """What a pipeline holds of its pool: what runs, as the operator's status says, at most its plan and its budget.

    A plan alone is a claim that any author of a plan can write.
    """
    running = _running_resources(pipeline)
    if plan is None:
        budget = pipeline.spec.budget
        bound = NO_RESOURCES if running is None else (budget.cores, budget.gpus)
    else:
        bound = plan_resources(plan, pipeline)
    return bound if running is None else (min(bound[0], running[0]), min(bound[1], running[1]))


def _running_resources(pipeline: InferencePipeline) -> ResourceAmount | None:
    """What the operator's status says that runs; None if it says nothing that fits the pipeline."""
    status = pipeline.status or {}
    try:
        gpus = (
            stage["replicas"] * pipeline.spec.stage(stage["name"]).variant(stage["variant"]).resources.gpu
            for stage in status.get("stages", ())
        )
        return parse_quantity(status["cores"]), sum(gpus)
    except (KeyError, TypeError, ValueError):
        return None


def notify_members(members: Iterable[PoolMember]) -> None:
    for member in members:
        member.wake()


class PoolPlanner:
    """All pools and the allocations of their pipelines. Thread-safe."""

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self._ledgers = {name: PoolLedger(pool) for name, pool in pools.items()}
        self._lock = threading.Lock()  # guards the ledgers; never held during a solve

    def planner(
        self, key: str, pipeline: InferencePipeline, current: PipelinePlan | None, wake: Callable[[], object]
    ) -> Planner:
        """The planner of one pipeline, whose allocation is its `current` plan; `wake` triggers its next tick."""
        with self._lock:
            ledger = self._ledgers.get(pipeline.spec.budget.pool or "")
            if ledger is not None and may_join(ledger.pool, pipeline):
                ledger.members[key] = PoolMember(held_resources(current, pipeline), wake)
        return partial(self._plan, key, wake)

    def record_usage(
        self, key: str, wake: Callable[[], object], pipeline: InferencePipeline, current: PipelinePlan | None
    ) -> None:
        """Record the allocation of a pipeline that is not in Auto mode, whose plans are written elsewhere."""
        name = pipeline.spec.budget.pool
        with self._lock:
            self._remove(key, except_pool=name)
            ledger = self._ledgers.get(name or "")
            if ledger is not None and may_join(ledger.pool, pipeline):
                ledger.record_usage(key, held_resources(current, pipeline), wake)

    def remove(self, key: str) -> None:
        with self._lock:
            self._remove(key, except_pool=None)

    def _remove(self, key: str, except_pool: str | None) -> None:
        for name, ledger in self._ledgers.items():
            if name != except_pool and ledger.members.pop(key, None) is not None:
                notify_members(ledger.members.values())

    def _plan(
        self,
        key: str,
        wake: Callable[[], object],
        pipeline: InferencePipeline,
        profiles: Mapping[str, ModelProfile],
        inputs: PlanningInputs,
    ) -> PipelinePlan:
        name = pipeline.spec.budget.pool
        with self._lock:
            self._remove(key, except_pool=name)
        if name is None:
            return decide(pipeline, profiles, inputs)
        ledger = self._ledger(name, pipeline)
        with ledger.decision_lock, time_limit():
            return self._decide(name, ledger, key, PlanRequest(pipeline, profiles, inputs), wake)

    def _ledger(self, name: str, pipeline: InferencePipeline) -> PoolLedger:
        if name not in self._ledgers:
            known = ", ".join(self._ledgers) or "none"
            raise PlanningError(f"budget.pool {name!r} is not in the file of pools; pools: {known}")
        ledger, namespace = self._ledgers[name], pipeline.metadata.namespace
        if not may_join(ledger.pool, pipeline):
            allowed = ", ".join(ledger.pool.namespaces)
            raise PlanningError(f"budget.pool {name!r} is not for namespace {namespace}; it is for: {allowed}")
        return ledger

    def _decide(
        self, name: str, ledger: PoolLedger, key: str, request: PlanRequest, wake: Callable[[], object]
    ) -> PipelinePlan:
        problem, forecast = planning_problem(request.pipeline, request.profiles, request.planning_inputs)
        demand, decides = PoolDemand(problem), request.pipeline.spec.mode == "Auto"
        if decides:
            with self._lock:
                ledger.members.setdefault(
                    key, PoolMember(held_resources(request.planning_inputs.current, request.pipeline), wake)
                ).demand = demand
        joint = self._plan_jointly(name, ledger, key, demand)
        with self._lock:
            room = ledger.room(key)
            waits = joint is None or not fits(solution_resources(joint[key]), room)
            if decides and waits and joint is not None:
                ledger.notify_due_members(key, joint)
        if joint is None or waits:
            plan = _decide_within(request, room, name)
        else:
            plan = build_plan(request.pipeline, problem, joint[key], forecast, request.planning_inputs.now_seconds)
        if decides:
            self._record_allocation(
                name, ledger, key, plan_resources(plan, request.pipeline), {} if waits else joint or {}
            )
        return plan

    def _plan_jointly(
        self, name: str, ledger: PoolLedger, key: str, demand: PoolDemand
    ) -> dict[str, PlanSolution] | None:
        """Plan for all pipelines that decide and for this demand; None if the smallest plans do not fit together.

        A pipeline that cannot be planned is left out and keeps its allocation. New pipelines wait if the pool is full.
        Raises PlanningError if this pipeline itself cannot be planned.
        """
        while True:
            with self._lock:
                left = ledger.available(key)
                demands = {other: member.demand for other, member in ledger.members.items() if member.demand}
                demands[key] = demand
                settled = {other: demands[other] for other in demands if ledger.allocated(other) != NO_RESOURCES}
            broken = _unplannable(left, demands)
            if not broken:
                break
            with self._lock:
                for other in broken.keys() & ledger.members.keys():
                    ledger.members[other].demand = None
            if key in broken:
                raise broken[key]
        joint = _split_or_none(name, left, demands)
        if joint is None and key in settled and len(settled) < len(demands):
            joint = _split_or_none(name, left, settled)
        return joint

    def _record_allocation(
        self, name: str, ledger: PoolLedger, key: str, used: ResourceAmount, joint: Mapping[str, PlanSolution]
    ) -> None:
        """Record an allocation and wake those whose part is due; raise PlanningError if the resources are taken."""
        with self._lock:
            own = ledger.members.get(key)
            if own is None:
                return
            if not fits(used, ledger.room(key)):
                own.wake()
                raise PlanningError(f"pool {name}: another pipeline took the cores first; deciding again")
            moved, own.allocated = used != own.allocated, used
            if moved:
                ledger.notify_due_members(key, joint)


def _unplannable(left: Pool, demands: Mapping[str, PoolDemand]) -> dict[str, PlanningError]:
    broken = {}
    for key, demand in demands.items():
        try:
            demand.solve(left)
        except PlanningError as error:
            broken[key] = error
    return broken


def _split_or_none(name: str, left: Pool, demands: Mapping[str, PoolDemand]) -> dict[str, PlanSolution] | None:
    """Split a pool; None also if the time limit was reached before a plan for part of the load was found."""
    try:
        return split_pool(name, left, demands)
    except PlanningError:
        return None


def _decide_within(request: PlanRequest, room: ResourceAmount, name: str) -> PipelinePlan:
    """Decide alone, within the resources that are free until other pipelines release theirs."""
    limited = request.pipeline.replace(spec=limit_budget(request.pipeline.spec, *room))
    try:
        return decide(limited, request.profiles, request.planning_inputs)
    except PlanningError as error:
        free = f"{room[0]:g} cores and {room[1]} GPUs"
        raise PlanningError(f"pool {name} has {free} free until other pipelines release theirs: {error}") from error
