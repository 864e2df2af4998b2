"""Pipelines of one pool that tick at their own times: every decision is made for all, and one pipeline's is handed out.

A pipeline entitled to more waits until others release it; they are woken, and the pool is never exceeded. A pipeline
that does not decide (Advisory, Paused, without profiles, or not yet since the adapter started) keeps what it holds and
holds up no other: advice is what it would get if it decided, and takes nothing from anybody. Nothing is stored: the
plans in force tell who holds what.
"""

import threading
from collections.abc import Callable, Mapping

from trimtab_adapter.planning.decide import PlanningError, PlanningInputs, build_plan, decide, planning_problem
from trimtab_adapter.planning.pool_allocation import PlanRequest, PoolDemand, split_pool
from trimtab_adapter.planning.pool_ledger import (
    NO_RESOURCES,
    PoolLedger,
    PoolMember,
    ResourceAmount,
    fits,
    may_join,
    notify_members,
    plan_resources,
    solution_resources,
)
from trimtab_adapter.planning.relaxation import PlanSolution
from trimtab_adapter.solvers.time_limit import time_limit
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.pool import Pool
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline

Planner = Callable[[InferencePipeline, Mapping[str, ModelProfile], PlanningInputs], PipelinePlan]


class PoolPlanner:
    """All pools, and who holds what of them. Safe to use from several threads."""

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self._ledgers = {name: PoolLedger(pool) for name, pool in pools.items()}
        self._lock = threading.Lock()  # around what is noted at the tables; never held while anything is solved

    def planner(
        self, key: str, pipeline: InferencePipeline, current: PipelinePlan | None, wake: Callable[[], None]
    ) -> Planner:
        """What decides for one pipeline, with the signature of `decide`; `wake` brings its next tick forward.

        `current` is what it has in force, which is its own from now on.
        """

        def plan(
            asked: InferencePipeline, profiles: Mapping[str, ModelProfile], inputs: PlanningInputs
        ) -> PipelinePlan:
            return self._plan(key, PlanRequest(asked, profiles, inputs), wake)

        with self._lock:
            ledger = self._ledgers.get(pipeline.spec.budget.pool or "")
            if ledger is not None and may_join(ledger.pool, pipeline):
                ledger.members[key] = PoolMember(plan_resources(current, pipeline), wake)
        return plan

    def record_usage(
        self, key: str, wake: Callable[[], None], pipeline: InferencePipeline, current: PipelinePlan | None
    ) -> None:
        """Note what a pipeline holds that is not in Auto mode: what runs there others wrote, at a time of their own."""
        name = pipeline.spec.budget.pool
        with self._lock:
            self._remove(key, except_pool=name)
            ledger = self._ledgers.get(name or "")
            if ledger is not None and may_join(ledger.pool, pipeline):
                ledger.record_usage(key, plan_resources(current, pipeline), wake)

    def remove(self, key: str) -> None:
        """Free what a pipeline held that is no more."""
        with self._lock:
            self._remove(key, except_pool=None)

    def _remove(self, key: str, except_pool: str | None) -> None:
        for name, ledger in self._ledgers.items():
            if name != except_pool and ledger.members.pop(key, None) is not None:
                notify_members(ledger.members.values())

    def _plan(self, key: str, request: PlanRequest, wake: Callable[[], None]) -> PipelinePlan:
        name = request.pipeline.spec.budget.pool
        with self._lock:
            self._remove(key, except_pool=name)
        if name is None:
            return decide(request.pipeline, request.profiles, request.planning_inputs)
        ledger = self._ledger(name, request.pipeline)
        with ledger.decision_lock, time_limit():
            return self._decide(name, ledger, key, request, wake)

    def _ledger(self, name: str, pipeline: InferencePipeline) -> PoolLedger:
        if name not in self._ledgers:
            known = ", ".join(self._ledgers) or "none"
            raise PlanningError(f"budget.pool {name!r} is not in the file of pools, which has: {known}")
        ledger, namespace = self._ledgers[name], pipeline.metadata.namespace
        if not may_join(ledger.pool, pipeline):
            allowed = ", ".join(ledger.pool.namespaces)
            raise PlanningError(f"budget.pool {name!r} is not for namespace {namespace}; it is for: {allowed}")
        return ledger

    def _decide(
        self, name: str, ledger: PoolLedger, key: str, request: PlanRequest, wake: Callable[[], None]
    ) -> PipelinePlan:
        problem, forecast = planning_problem(request.pipeline, request.profiles, request.planning_inputs)
        demand, decides = PoolDemand(problem), request.pipeline.spec.mode == "Auto"
        if decides:
            with self._lock:
                ledger.members.setdefault(
                    key, PoolMember(plan_resources(request.planning_inputs.current, request.pipeline), wake)
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
        """Plan for all that decide and for this pipeline's wish; None where not even the smallest plans find room.

        Who cannot be planned for sits out: the others share what it leaves. Newcomers wait where they are too many.
        Raises PlanningError where that is this pipeline itself.
        """
        while True:
            with self._lock:
                left, demands = ledger.available(key), ledger.demands() | {key: demand}
                settled = {other: demands[other] for other in demands if ledger.allocated(other) != NO_RESOURCES}
            broken = _unplannable(left, demands)
            if not broken:
                break
            with self._lock:
                for other in broken:
                    ledger.withdraw_demand(other)
            if key in broken:
                raise broken[key]
        joint = _split_or_none(name, left, demands)
        if joint is None and key in settled and len(settled) < len(demands):
            joint = _split_or_none(name, left, settled)
        return joint

    def _record_allocation(
        self, name: str, ledger: PoolLedger, key: str, used: ResourceAmount, joint: Mapping[str, PlanSolution]
    ) -> None:
        """Note what a pipeline holds from now on, and wake those whose part of the joint plan that makes due.

        Raises PlanningError where another took it while this plan was made.
        """
        with self._lock:
            own = ledger.members.get(key)
            if own is None:
                return
            if not fits(used, ledger.room(key)):
                own.wake()
                raise PlanningError(f"pool {name}: another pipeline came in between; it is decided anew at once")
            moved, own.allocated = used != own.allocated, used
            if moved:
                ledger.notify_due_members(key, joint)


def _unplannable(left: Pool, demands: Mapping[str, PoolDemand]) -> dict[str, PlanningError]:
    """Whose wishes nobody can plan for, and why."""
    broken = {}
    for key, demand in demands.items():
        try:
            demand.solve(left)
        except PlanningError as error:
            broken[key] = error
    return broken


def _split_or_none(name: str, left: Pool, demands: Mapping[str, PoolDemand]) -> dict[str, PlanSolution] | None:
    """Divide a pool; None too where the time was up before a plan was found for a part of the load."""
    try:
        return split_pool(name, left, demands)
    except PlanningError:
        return None


def _decide_within(request: PlanRequest, room: ResourceAmount, name: str) -> PipelinePlan:
    """Decide alone, within what there is room for until others have given up theirs."""
    pipeline, budget = request.pipeline, request.pipeline.spec.budget
    less = {"cores": min(budget.cores, room[0]), "gpus": min(budget.gpus, room[1])}
    spec = pipeline.spec.model_copy(update={"budget": budget.model_copy(update=less)})
    try:
        return decide(pipeline.model_copy(update={"spec": spec}), request.profiles, request.planning_inputs)
    except PlanningError as error:
        free = f"{room[0]:g} cores and {room[1]} GPUs"
        raise PlanningError(
            f"pool {name} has {free} free until other pipelines have given up theirs: {error}"
        ) from error
