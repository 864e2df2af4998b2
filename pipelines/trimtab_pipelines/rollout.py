"""How a plan becomes true without losing a request: how many replicas each hosting set should have next. Pure.

The operator, the local runtime and the simulator roll out by this one rule: counts in, counts out.

Make before break: what is no longer wanted keeps serving until what follows it is ready; the routers move by themselves
in between. A stage that the plan does without, as another does its work, goes last; so does one that the pipeline has
no more, as routers of before need it. All replicas together never ask for
more than the limit, those that are terminating included. Where the limit leaves no room, replicas are exchanged one by one,
and a stage loses its last ready replica only where nothing else could ever make room. Level-triggered: call `decide`
with what is true now, carry out what it returns, call it again when anything has changed.
"""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

ReplicaState = Literal["starting", "ready", "draining", "stopping"]
"""Of one replica; it serves new batches while it is ready, and holds its room until it is gone."""
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Capacity:
    """An amount of what replicas ask for."""

    cores: float = 0.0
    gpus: int = 0

    def __add__(self, other: "Capacity") -> "Capacity":
        return Capacity(self.cores + other.cores, self.gpus + other.gpus)

    def __sub__(self, other: "Capacity") -> "Capacity":
        return Capacity(self.cores - other.cores, self.gpus - other.gpus)

    def times(self, count: int) -> "Capacity":
        """As much as so many replicas ask for."""
        return Capacity(self.cores * count, self.gpus * count)

    def fits(self, other: "Capacity") -> bool:
        """Whether so much fits within."""
        return other.cores <= self.cores + _TOLERANCE and other.gpus <= self.gpus


def total(amounts: Iterable[Capacity]) -> Capacity:
    """Add up."""
    return sum(amounts, Capacity())


@dataclass(frozen=True, slots=True)
class Target:
    """What a plan asks of one stage: so many replicas of one hosting set."""

    stage: str
    name: str
    replicas: int
    per_replica: Capacity

    @property
    def requested(self) -> Capacity:
        """What all its replicas ask for."""
        return self.per_replica.times(self.replicas)


@dataclass(frozen=True, slots=True)
class ReplicaGroupState:
    """Replicas of one stage that are alike, as observed."""

    name: str
    stage: str
    per_replica: Capacity
    desired: int
    """Replicas it was last told to have."""
    present: int = 0
    """Replicas that exist and are not told to stop."""
    ready: int = 0
    unscheduled: int = 0
    """Replicas that wait for a node."""
    terminating: int = 0
    """Replicas told to stop that are still there."""
    surging: bool = False
    """It exchanges its replicas for ones of a new template and may have one more than desired while it does."""

    @classmethod
    def of(cls, name: str, stage: str, per_replica: Capacity, states: Iterable[str]) -> Self:
        """Count replicas that are started and stopped one by one: those not told to stop are desired."""
        count = Counter(states)
        living = count["starting"] + count["ready"]
        terminating = count["draining"] + count["stopping"]
        return cls(name, stage, per_replica, living, present=living, ready=count["ready"], terminating=terminating)

    @property
    def requested(self) -> Capacity:
        """What its replicas ask for, or will as soon as they are made."""
        return self.per_replica.times(max(self.desired + self.surging, self.present) + self.terminating)


def decide(
    targets: Sequence[Target], sets: Sequence[ReplicaGroupState], limit: Capacity, *, new_routes: bool = True
) -> dict[str, int]:
    """The number of replicas each hosting set should be told to have, new ones included.

    Args:
        targets: what should run, one a stage.
        sets: every hosting set that exists.
        limit: most that all replicas may ask for.
        new_routes: no router is left that knows stages which have no target any more.
    """
    known = {each.name for each in sets}
    missing = [ReplicaGroupState(t.name, t.stage, t.per_replica, desired=0) for t in targets if t.name not in known]
    rollout = _RolloutStep([*sets, *missing], {target.stage: target for target in targets}, limit)
    rollout.release_unschedulable()
    spared = {target.stage for target in targets if not target.replicas and not rollout.is_replaceable(target)}
    for target in targets:
        if target.stage not in spared:
            rollout.scale_up(target)
    unmet = [target for target in targets if rollout.desired[target.name] < target.replicas]
    rollout.scale_down(unmet, spared)
    rollout.scale_down_removed(unmet, new_routes=new_routes)
    if unmet and limit.fits(total(target.requested for target in targets)) and not rollout.in_progress(unmet):
        rollout.make_room(unmet)
    return rollout.desired


@dataclass(slots=True)
class _RolloutStep:
    """The numbers as they will be once what was decided so far is written."""

    sets: list[ReplicaGroupState]
    targets: Mapping[str, Target]
    limit: Capacity
    desired: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.desired = {each.name: each.desired for each in self.sets}

    @property
    def free(self) -> Capacity:
        """Room for more; what was only just told to go still counts."""
        added = (each.per_replica.times(max(self.desired[each.name] - each.desired, 0)) for each in self.sets)
        return self.limit - total(each.requested for each in self.sets) - total(added)

    @property
    def removed(self) -> list[ReplicaGroupState]:
        """The hosting sets of stages that the pipeline has no more."""
        return [each for each in self.sets if each.stage not in self.targets and self.desired[each.name]]

    def stale(self, stage: str) -> list[ReplicaGroupState]:
        """List the stage's hosting sets that the plan does not ask for."""
        wanted = self.targets[stage].name if stage in self.targets else None
        return [each for each in self.sets if each.stage == stage and each.name != wanted and self.desired[each.name]]

    def ready(self, stage: str) -> int:
        """Ready replicas of a stage that may stay, whichever set they are of."""
        return sum(min(each.ready, self.desired[each.name]) for each in self.sets if each.stage == stage)

    def release_unschedulable(self) -> None:
        """Where the limit is less than is held, take back replicas that wait for a node in vain."""
        waiting = [each for each in self.sets if each.unscheduled]
        for each in sorted(waiting, key=self.is_target):
            over = not self.limit.fits(total(s.requested for s in self.sets))
            if over:
                self.desired[each.name] = max(each.desired - each.unscheduled, 0)

    def is_target(self, each: ReplicaGroupState) -> bool:
        """Whether the plan asks for this set."""
        return each.stage in self.targets and self.targets[each.stage].name == each.name

    def scale_up(self, target: Target) -> None:
        """Ask for what is missing, as far as there is room; take back what is too many."""
        desired = self.desired[target.name]
        if desired > target.replicas:
            self.desired[target.name] = target.replicas
        while self.desired[target.name] < target.replicas and self.free.fits(target.per_replica):
            self.desired[target.name] += 1

    def is_replaceable(self, idle: Target) -> bool:
        """Whether all other stages run as the plan asks, so that nothing needs this one any more, which it asks not."""
        return all(self.is_ready(target) for target in self.targets.values() if target is not idle and target.replicas)

    def scale_down(self, unmet: Sequence[Target], spared: Container[str]) -> None:
        """Let go of what a ready successor replaces, and of what is not ready and in the way."""
        for each in self.sets:
            target = self.targets.get(each.stage)
            if each.stage in spared:
                self.desired[each.name] = min(self.desired[each.name], each.ready)
            elif target is not None and each.name != target.name:
                if self.is_ready(target):
                    self.desired[each.name] = 0
                elif target in unmet:
                    self.desired[each.name] = min(self.desired[each.name], each.ready)

    def scale_down_removed(self, unmet: Sequence[Target], *, new_routes: bool) -> None:
        """Let go of stages that are gone once nobody needs them, and before of what is not ready and in the way."""
        unneeded = new_routes and all(map(self.is_ready, self.targets.values()))
        for each in self.removed:
            if unneeded:
                self.desired[each.name] = 0
            elif unmet:
                self.desired[each.name] = min(self.desired[each.name], each.ready)

    def is_ready(self, target: Target) -> bool:
        """Whether all replicas the plan asks for are ready."""
        return any(each.name == target.name and each.ready >= target.replicas for each in self.sets)

    def in_progress(self, unmet: Sequence[Target]) -> bool:
        """Whether room may yet come of itself, or what was brought up last is not ready yet."""
        stages = {target.stage for target in unmet}
        return any(
            each.terminating
            or each.present > self.desired[each.name]
            or each.desired > self.desired[each.name]
            or (self.is_target(each) and each.ready < self.desired[each.name])
            or (each.surging and each.stage not in stages)
            for each in self.sets
        )

    def make_room(self, unmet: Sequence[Target]) -> None:
        """Give up one replica that the plan does not ask for: a spare one, else one whose place its heir can take.

        Of a stage that the plan does without any will do; what waits for it goes on once those that follow are ready.
        One that the pipeline has no more loses its last replica before a stage does that it still has.
        """
        for each in self.sets:
            target = self.targets.get(each.stage)
            if target is not None and not target.replicas and self.desired[each.name]:
                self.desired[each.name] -= 1
                return
        stale = [(target, each) for target in unmet for each in self.stale(target.stage)]
        spare = [each for each in (*self.removed, *(each for _, each in stale)) if self.ready(each.stage) > 1]
        heirs = [each for target, each in stale if (each.per_replica + self.free).fits(target.per_replica)]
        last = sorted((each for _, each in stale), key=lambda each: -each.per_replica.cores)
        for each in sorted(spare, key=lambda each: -self.ready(each.stage)) or self.removed or heirs or last:
            self.desired[each.name] -= 1
            return


def surge_allowed(each: ReplicaGroupState, others: Sequence[ReplicaGroupState], limit: Capacity) -> bool:
    """Whether a set whose template changes may have one more replica meanwhile, rather than one less."""
    if each.surging:
        return True
    return (limit - each.requested - total(other.requested for other in others)).fits(each.per_replica)
