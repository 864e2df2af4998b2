"""Pipelines of one pool that tick at their own times: every decision is made for all, and one pipeline's is handed out.

A pipeline entitled to more waits until others release it; they are woken, and the pool is never exceeded. A pipeline
that does not decide (Advisory, Paused, without profiles, or not yet since the adapter started) keeps what it holds and
holds up no other: advice is what it would get if it decided, and takes nothing from anybody. Nothing is stored: the
plans in force tell who holds what.
"""

import threading
from collections.abc import Callable, Mapping

from trimtab_adapter.planning.decide import PlanningError, PlanningInputs, decide, plan_of, planning_problem
from trimtab_adapter.planning.pool_allocation import Member, PoolDemand, split_pool
from trimtab_adapter.planning.pool_ledger import (
    NOTHING,
    PoolLedger,
    PoolMember,
    Room,
    fits,
    may_join,
    needs,
    notify_members,
    uses,
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
        self._tables = {name: PoolLedger(pool) for name, pool in pools.items()}
        self._lock = threading.Lock()  # around what is noted at the tables; never held while anything is solved

    def planner(
        self, key: str, pipeline: InferencePipeline, current: PipelinePlan | None, wake: Callable[[], None]
    ) -> Planner:
        """What decides for one pipeline, with the signature of `decide`; `wake` brings its next tick forward.

        `current` is what it has in force, which is its own from now on.
        """

        def plan(
            asked: InferencePipeline, profiles: Mapping[str, ModelProfile], situation: PlanningInputs
        ) -> PipelinePlan:
            return self._plan(key, Member(asked, profiles, situation), wake)

        with self._lock:
            table = self._tables.get(pipeline.spec.budget.pool or "")
            if table is not None and may_join(table.pool, pipeline):
                table.seats[key] = PoolMember(uses(current, pipeline), wake)
        return plan

    def note(
        self, key: str, wake: Callable[[], None], pipeline: InferencePipeline, current: PipelinePlan | None
    ) -> None:
        """Note what a pipeline holds that is not in Auto mode: what runs there others wrote, at a time of their own."""
        name = pipeline.spec.budget.pool
        with self._lock:
            self._leave(key, of_all_but=name)
            table = self._tables.get(name or "")
            if table is not None and may_join(table.pool, pipeline):
                table.note(key, uses(current, pipeline), wake)

    def forget(self, key: str) -> None:
        """Free what a pipeline held that is no more."""
        with self._lock:
            self._leave(key, of_all_but=None)

    def _leave(self, key: str, of_all_but: str | None) -> None:
        for name, table in self._tables.items():
            if name != of_all_but and table.seats.pop(key, None) is not None:
                notify_members(table.seats.values())

    def _plan(self, key: str, member: Member, wake: Callable[[], None]) -> PipelinePlan:
        name = member.pipeline.spec.budget.pool
        with self._lock:
            self._leave(key, of_all_but=name)
        if name is None:
            return decide(member.pipeline, member.profiles, member.situation)
        table = self._table(name, member.pipeline)
        with table.deciding, time_limit():
            return self._decide(name, table, key, member, wake)

    def _table(self, name: str, pipeline: InferencePipeline) -> PoolLedger:
        if name not in self._tables:
            known = ", ".join(self._tables) or "none"
            raise PlanningError(f"budget.pool {name!r} is not in the file of pools, which has: {known}")
        table, namespace = self._tables[name], pipeline.metadata.namespace
        if not may_join(table.pool, pipeline):
            allowed = ", ".join(table.pool.namespaces)
            raise PlanningError(f"budget.pool {name!r} is not for namespace {namespace}; it is for: {allowed}")
        return table

    def _decide(self, name: str, table: PoolLedger, key: str, member: Member, wake: Callable[[], None]) -> PipelinePlan:
        question, forecast = planning_problem(member.pipeline, member.profiles, member.situation)
        wish, acts = PoolDemand(question), member.pipeline.spec.mode == "Auto"
        if acts:
            with self._lock:
                table.seats.setdefault(
                    key, PoolMember(uses(member.situation.current, member.pipeline), wake)
                ).asked = wish
        joint = self._joint(name, table, key, wish)
        with self._lock:
            room = table.room(key)
            waits = joint is None or not fits(needs(joint[key]), room)
            if acts and waits and joint is not None:
                table.wake_those_due(key, joint)
        if joint is None or waits:
            plan = _within(member, room, name)
        else:
            plan = plan_of(member.pipeline, question, joint[key], forecast, member.situation.now_seconds)
        if acts:
            self._take(name, table, key, uses(plan, member.pipeline), {} if waits else joint or {})
        return plan

    def _joint(self, name: str, table: PoolLedger, key: str, wish: PoolDemand) -> dict[str, PlanSolution] | None:
        """Plan for all that decide and for this pipeline's wish; None where not even the smallest plans find room.

        Who cannot be planned for sits out: the others share what it leaves. Newcomers wait where they are too many.
        Raises PlanningError where that is this pipeline itself.
        """
        while True:
            with self._lock:
                left, wishes = table.left(key), table.wishes() | {key: wish}
                settled = {other: wishes[other] for other in wishes if table.held(other) != NOTHING}
            broken = _unplannable(left, wishes)
            if not broken:
                break
            with self._lock:
                for other in broken:
                    table.stop_deciding(other)
            if key in broken:
                raise broken[key]
        joint = _divided(name, left, wishes)
        if joint is None and key in settled and len(settled) < len(wishes):
            joint = _divided(name, left, settled)
        return joint

    def _take(self, name: str, table: PoolLedger, key: str, used: Room, joint: Mapping[str, PlanSolution]) -> None:
        """Note what a pipeline holds from now on, and wake those whose part of the joint plan that makes due.

        Raises PlanningError where another took it while this plan was made.
        """
        with self._lock:
            own = table.seats.get(key)
            if own is None:
                return
            if not fits(used, table.room(key)):
                own.wake()
                raise PlanningError(f"pool {name}: another pipeline came in between; it is decided anew at once")
            moved, own.held = used != own.held, used
            if moved:
                table.wake_those_due(key, joint)


def _unplannable(left: Pool, wishes: Mapping[str, PoolDemand]) -> dict[str, PlanningError]:
    """Whose wishes nobody can plan for, and why."""
    broken = {}
    for key, wish in wishes.items():
        try:
            wish.answer(left)
        except PlanningError as error:
            broken[key] = error
    return broken


def _divided(name: str, left: Pool, wishes: Mapping[str, PoolDemand]) -> dict[str, PlanSolution] | None:
    """Divide a pool; None too where the time was up before a plan was found for a part of the load."""
    try:
        return split_pool(name, left, wishes)
    except PlanningError:
        return None


def _within(member: Member, room: Room, name: str) -> PipelinePlan:
    """Decide alone, within what there is room for until others have given up theirs."""
    pipeline, budget = member.pipeline, member.pipeline.spec.budget
    less = {"cores": min(budget.cores, room[0]), "gpus": min(budget.gpus, room[1])}
    spec = pipeline.spec.model_copy(update={"budget": budget.model_copy(update=less)})
    try:
        return decide(pipeline.model_copy(update={"spec": spec}), member.profiles, member.situation)
    except PlanningError as error:
        free = f"{room[0]:g} cores and {room[1]} GPUs"
        raise PlanningError(
            f"pool {name} has {free} free until other pipelines have given up theirs: {error}"
        ) from error
