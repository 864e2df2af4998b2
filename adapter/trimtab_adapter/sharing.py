"""Pipelines of one pool that tick at their own times: every decision is made for all, and one pipeline's is handed out.

What the others have in force stays theirs until they give it up: a pipeline that is due more waits for the pool to
have it, those that hold it are woken, and so the pool is exceeded at no time. A pipeline that does not decide (Paused,
or not yet since the adapter started) keeps what it holds. In memory only: plans in force tell who holds what.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from trimtab_adapter.decide import PlanningError, Situation, decide
from trimtab_adapter.pools import Member, plan_together
from trimtab_adapter.program import TOLERANCE
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.pool import Pool
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline

Planner = Callable[[InferencePipeline, Mapping[str, ModelProfile], Situation], PipelinePlan]
Room = tuple[float, int]  # cores and GPUs


@dataclass(slots=True)
class _Seat:
    """What a pipeline holds of a pool, how to have it decide again, and its latest wish, None before the first."""

    held: Room
    wake: Callable[[], None]
    member: Member | None = None


class SharedPools:
    """All pools, and who holds what of them. Safe to use from several threads."""

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self._pools = dict(pools)
        self._seats: dict[str, dict[str, _Seat]] = {name: {} for name in pools}
        self._lock = threading.Lock()

    def planner(
        self, key: str, pipeline: InferencePipeline, current: PipelinePlan | None, wake: Callable[[], None]
    ) -> Planner:
        """Return what decides for one pipeline, with the signature of `decide`; `wake` brings its next tick forward.

        `current` is what it has in force, which is its own from now on.
        """

        def plan(asked: InferencePipeline, profiles: Mapping[str, ModelProfile], situation: Situation) -> PipelinePlan:
            with self._lock:
                return self._plan(key, Member(asked, profiles, situation), wake)

        with self._lock:
            seats = self._seats.get(pipeline.spec.budget.pool or "")
            if seats is not None:
                seats[key] = _Seat(_uses(current), wake)
        return plan

    def forget(self, key: str) -> None:
        """Free what a pipeline held that is no more."""
        with self._lock:
            self._leave(key, of_all_but=None)

    def _leave(self, key: str, of_all_but: str | None) -> None:
        for name, seats in self._seats.items():
            if name != of_all_but and seats.pop(key, None) is not None:
                _wake(seats.values())

    def _plan(self, key: str, member: Member, wake: Callable[[], None]) -> PipelinePlan:
        name = member.pipeline.spec.budget.pool
        self._leave(key, of_all_but=name)
        if name is None:
            return decide(member.pipeline, member.profiles, member.situation)
        if name not in self._pools:
            known = ", ".join(self._pools) or "none"
            raise PlanningError(f"budget.pool {name!r} is not in the file of pools, which has: {known}")
        seats = self._seats[name]
        own = seats.setdefault(key, _Seat(_uses(member.situation.current), wake))
        own.member = member
        joint = plan_together(name, self._left(name), _deciding(seats))
        room = self._room(key, name)
        if _fits(_uses(joint[key]), room):
            plan, waits = joint[key], False
        else:
            _wake(self._due(key, seats, joint))
            plan, waits = _within(member, room, name), True
        moved = _uses(plan) != own.held
        if member.pipeline.spec.mode == "Auto":
            own.held = _uses(plan)
        if moved and not waits:
            _wake(self._due(key, seats, joint))
        return plan

    @staticmethod
    def _due(key: str, seats: Mapping[str, _Seat], joint: Mapping[str, PipelinePlan]) -> list[_Seat]:
        """Return the others whose part of the joint plan is not what they hold."""
        return [seats[other] for other, wish in joint.items() if other != key and _uses(wish) != seats[other].held]

    def _left(self, name: str) -> Pool:
        """Return what those that do not decide leave of a pool."""
        pool = self._pools[name]
        fixed = [seat.held for seat in self._seats[name].values() if seat.member is None]
        cores = max(pool.cores - sum(held[0] for held in fixed), TOLERANCE)
        return Pool(cores=cores, gpus=max(pool.gpus - sum(held[1] for held in fixed), 0))

    def _room(self, key: str, name: str) -> Room:
        """Return what a pipeline may take now: what the others do not hold, and at least what is its own."""
        seats, pool = self._seats[name], self._pools[name]
        others = [seat.held for other, seat in seats.items() if other != key]
        own_cores, own_gpus = seats[key].held
        cores = max(pool.cores - sum(held[0] for held in others), own_cores)
        return cores, max(pool.gpus - sum(held[1] for held in others), own_gpus)


def _fits(used: Room, room: Room) -> bool:
    return used[0] <= room[0] + TOLERANCE and used[1] <= room[1]


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


def _deciding(seats: Mapping[str, _Seat]) -> dict[str, Member]:
    return {key: seat.member for key, seat in seats.items() if seat.member is not None}


def _uses(plan: PipelinePlan | None) -> Room:
    if plan is None or plan.spec.expected is None:
        return 0.0, 0
    return plan.spec.expected.cores, plan.spec.expected.gpus


def _wake(seats: Iterable[_Seat]) -> None:
    for seat in seats:
        seat.wake()
