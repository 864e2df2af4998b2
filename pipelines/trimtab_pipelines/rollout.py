"""Rollout of a plan without losing requests: the next number of replicas of each replica group.

The operator, the local runtime and the simulator use this rule. Make before break: replicas that are no longer planned
serve until their successors are ready, and routers switch on their own in between. A stage that receives no traffic
under the plan is scaled down last; so is one that was removed from the pipeline, since older routers may still need it.
All replicas together, including terminating ones, never request more than the limit. If the limit leaves no capacity,
replicas are exchanged one by one, and a stage loses its last ready replica only if nothing else could free capacity.
Replicas on nodes that are about to go serve until their successors are ready, if the limit leaves capacity for them.
Level-triggered: call `decide` with the observed state, apply the result, and call it again after any change.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

ReplicaState = Literal["starting", "ready", "draining", "stopping"]
"""A replica serves new batches while it is ready, and uses its resources until it is gone."""
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Capacity:
    """Resources that replicas request."""

    cores: float = 0.0
    gpus: int = 0
    flavors: Mapping[str, float] = field(default_factory=dict)
    """Devices by resource flavor, cores of replicas without devices; as a limit, only flavors that have one."""

    @classmethod
    def in_flavor(cls, cores: float, gpus: int, flavor: str | None) -> "Capacity":
        """Request of one replica on a resource flavor; None counts in no flavor."""
        return cls(cores, gpus, {flavor: gpus or cores} if flavor else {})

    def __add__(self, other: "Capacity") -> "Capacity":
        flavors = {name: self.flavors.get(name, 0.0) + amount for name, amount in other.flavors.items()}
        return Capacity(self.cores + other.cores, self.gpus + other.gpus, {**self.flavors, **flavors})

    def __sub__(self, other: "Capacity") -> "Capacity":
        flavors = {name: amount - other.flavors.get(name, 0.0) for name, amount in self.flavors.items()}
        return Capacity(self.cores - other.cores, self.gpus - other.gpus, flavors)

    def times(self, count: int) -> "Capacity":
        flavors = {name: amount * count for name, amount in self.flavors.items()}
        return Capacity(self.cores * count, self.gpus * count, flavors)

    def fits(self, other: "Capacity") -> bool:
        in_flavors = all(other.flavors.get(name, 0.0) <= most + _TOLERANCE for name, most in self.flavors.items())
        return other.cores <= self.cores + _TOLERANCE and other.gpus <= self.gpus and in_flavors


def total(amounts: Iterable[Capacity]) -> Capacity:
    return sum(amounts, Capacity())


@dataclass(frozen=True, slots=True)
class Target:
    """Planned replicas of one replica group of a stage."""

    stage: str
    name: str
    replicas: int
    per_replica: Capacity

    @property
    def requested(self) -> Capacity:
        return self.per_replica.times(self.replicas)


@dataclass(frozen=True, slots=True)
class ReplicaGroupState:
    """Observed replicas of one replica group."""

    name: str
    stage: str
    per_replica: Capacity
    desired: int
    """Replicas in its spec."""
    present: int = 0
    """Replicas that exist and are not terminating."""
    ready: int = 0
    unscheduled: int = 0
    """Replicas that wait for a node."""
    terminating: int = 0
    """Replicas that are terminating."""
    leaving: int = 0
    """Present replicas on nodes that are about to go."""
    ready_leaving: int = 0
    surging: bool = False
    """Whether it rolls out a new pod template and may have one replica more than desired."""

    @classmethod
    def of(cls, name: str, stage: str, per_replica: Capacity, states: Iterable[str]) -> Self:
        """Count replicas that are started and stopped individually; those not terminating are desired."""
        count = Counter(states)
        living = count["starting"] + count["ready"]
        terminating = count["draining"] + count["stopping"]
        return cls(name, stage, per_replica, living, present=living, ready=count["ready"], terminating=terminating)

    @property
    def requested(self) -> Capacity:
        """Resources that its replicas request, or will once they are created."""
        return self.per_replica.times(max(self.desired + self.surging, self.present) + self.terminating)


def decide(
    targets: Sequence[Target], sets: Sequence[ReplicaGroupState], limit: Capacity, *, new_routes: bool = True
) -> dict[str, int]:
    """The next number of replicas of each replica group, including new ones; `targets` has one or more for each stage.

    `new_routes` is whether no router remains that uses stages without a target.
    """
    existing = {state.name for state in sets}
    missing = [ReplicaGroupState(t.name, t.stage, t.per_replica, desired=0) for t in targets if t.name not in existing]
    rollout = _RolloutStep([*sets, *missing], {target.name: target for target in targets}, limit)
    rollout.release_unschedulable()
    idle = {target.stage for target in targets if not target.replicas and not rollout.is_replaceable(target)}
    for target in targets:
        if target.stage not in idle:
            rollout.scale_up(target)
    unmet = [target for target in targets if rollout.desired[target.name] < target.replicas]
    rollout.scale_down(unmet, idle)
    rollout.scale_down_removed(unmet, new_routes=new_routes)
    if unmet and limit.fits(total(target.requested for target in targets)) and not rollout.in_progress(unmet):
        rollout.make_room(unmet)
    rollout.replace_leaving()
    return rollout.desired


def successors(planned: int, leaving: int, ready_staying: int) -> int:
    """Replicas to add to those planned until as many are ready on nodes that stay."""
    return 0 if ready_staying >= planned else min(leaving, planned)


@dataclass(slots=True)
class _RolloutStep:
    """State of the replica groups while the next numbers are decided."""

    sets: list[ReplicaGroupState]
    targets: Mapping[str, Target]
    """By name of the replica group."""
    limit: Capacity
    desired: dict[str, int] = field(default_factory=dict)
    by_stage: dict[str, list[Target]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.desired = {state.name: state.desired for state in self.sets}
        for target in self.targets.values():
            self.by_stage.setdefault(target.stage, []).append(target)

    @property
    def free(self) -> Capacity:
        """Remaining capacity; replicas that were just released still count as used."""
        added = (state.per_replica.times(max(self.desired[state.name] - state.desired, 0)) for state in self.sets)
        return self.limit - total(state.requested for state in self.sets) - total(added)

    @property
    def removed(self) -> list[ReplicaGroupState]:
        return [state for state in self.sets if state.stage not in self.by_stage and self.desired[state.name]]

    def stale(self, stage: str) -> list[ReplicaGroupState]:
        """The stage's replica groups with replicas that the plan does not use."""
        return [state for state in self.sets if state.stage == stage and self.desired[state.name] > self.planned(state)]

    def planned(self, state: ReplicaGroupState) -> int:
        return self.targets[state.name].replicas if self.is_target(state) else 0

    def ready(self, stage: str) -> int:
        """Ready replicas of a stage that remain, in any replica group."""
        return sum(min(state.ready, self.desired[state.name]) for state in self.sets if state.stage == stage)

    def release_unschedulable(self) -> None:
        """While requests exceed the limit, release replicas that cannot be scheduled."""
        waiting = [state for state in self.sets if state.unscheduled]
        for state in sorted(waiting, key=self.is_target):
            exceeded = not self.limit.fits(total(s.requested for s in self.sets))
            if exceeded:
                self.desired[state.name] = max(state.desired - state.unscheduled, 0)

    def is_target(self, state: ReplicaGroupState) -> bool:
        return state.name in self.targets

    def scale_up(self, target: Target) -> None:
        """Request missing replicas within the limit; release surplus ones unless the stage's other groups need them."""
        others_ready = all(self.is_ready(other) for other in self.by_stage[target.stage] if other is not target)
        if self.desired[target.name] > target.replicas and others_ready:
            self.desired[target.name] = target.replicas
        while self.desired[target.name] < target.replicas and self.free.fits(target.per_replica):
            self.desired[target.name] += 1

    def is_replaceable(self, idle: Target) -> bool:
        """Whether all other stages run as planned, so that nothing needs an idle stage any more."""
        return all(self.is_ready(target) for target in self.targets.values() if target is not idle and target.replicas)

    def replace_leaving(self) -> None:
        """Request successors of replicas that are about to lose their nodes, within the limit."""
        for state in self.sets:
            planned = self.planned(state)
            if self.desired[state.name] != planned:
                continue
            for _ in range(successors(planned, state.leaving, state.ready - state.ready_leaving)):
                if self.desired[state.name] >= state.desired and not self.free.fits(state.per_replica):
                    break
                self.desired[state.name] += 1

    def scale_down(self, unmet: Sequence[Target], idle: Container[str]) -> None:
        """Release replicas that a ready successor replaces, and unready ones that block it."""
        for state in self.sets:
            targets = self.by_stage.get(state.stage, [])
            if state.stage in idle:
                self.desired[state.name] = min(self.desired[state.name], state.ready)
            elif targets and not self.is_target(state):
                if all(map(self.is_ready, targets)):
                    self.desired[state.name] = 0
                elif any(target in unmet for target in targets):
                    self.desired[state.name] = min(self.desired[state.name], state.ready)

    def scale_down_removed(self, unmet: Sequence[Target], *, new_routes: bool) -> None:
        """Release removed stages once unused; before that, their unready replicas that block others."""
        unused = new_routes and all(map(self.is_ready, self.targets.values()))
        for state in self.removed:
            if unused:
                self.desired[state.name] = 0
            elif unmet:
                self.desired[state.name] = min(self.desired[state.name], state.ready)

    def is_ready(self, target: Target) -> bool:
        return any(state.name == target.name and state.ready >= target.replicas for state in self.sets)

    def in_progress(self, unmet: Sequence[Target]) -> bool:
        """Whether capacity may still become free on its own, or new replicas are not ready yet."""
        stages = {target.stage for target in unmet}
        return any(
            state.terminating
            or state.present > self.desired[state.name]
            or state.desired > self.desired[state.name]
            or (self.is_target(state) and state.ready < self.desired[state.name])
            or (state.surging and state.stage not in stages)
            for state in self.sets
        )

    def make_room(self, unmet: Sequence[Target]) -> None:
        """Release one replica that the plan does not use: a spare one, else one whose successor fits in its place.

        A stage that is idle under the plan releases any replica. A removed stage loses its last replica before a
        planned one.
        """
        for state in self.sets:
            targets = self.by_stage.get(state.stage, [])
            if targets and not any(target.replicas for target in targets) and self.desired[state.name]:
                self.desired[state.name] -= 1
                return
        stale = [(target, state) for target in unmet for state in self.stale(target.stage)]
        spare = [state for state in (*self.removed, *(state for _, state in stale)) if self.ready(state.stage) > 1]
        replaceable = [state for target, state in stale if (state.per_replica + self.free).fits(target.per_replica)]
        last = sorted((state for _, state in stale), key=lambda state: -state.per_replica.cores)
        for state in sorted(spare, key=lambda state: -self.ready(state.stage)) or self.removed or replaceable or last:
            self.desired[state.name] -= 1
            return


def surge_allowed(state: ReplicaGroupState, others: Sequence[ReplicaGroupState], limit: Capacity) -> bool:
    """Whether a replica group with a new pod template may temporarily have one more replica instead of one less."""
    if state.surging:
        return True
    return (limit - state.requested - total(other.requested for other in others)).fits(state.per_replica)
