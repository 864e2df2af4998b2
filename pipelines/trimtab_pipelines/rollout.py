"""How a plan becomes true without losing a request: how many replicas each hosting set should have next. Pure.

The operator, the local runtime and the simulator roll out by this one rule: counts in, counts out.

Make before break: what is no longer wanted keeps serving until what follows it is ready; the routers move by themselves
in between. A stage that the plan does without, as another does its work, goes last; so does one that the pipeline has
no more, as routers of before need it. All replicas together never ask for
more than the limit, those that are leaving included. Where the limit leaves no room, replicas are exchanged one by one,
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

    def holds(self, other: "Capacity") -> bool:
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
    each: Capacity

    @property
    def room(self) -> Capacity:
        """What all its replicas ask for."""
        return self.each.times(self.replicas)


@dataclass(frozen=True, slots=True)
class HostingSet:
    """Replicas of one stage that are alike, as observed."""

    name: str
    stage: str
    each: Capacity
    desired: int
    """Replicas it was last told to have."""
    present: int = 0
    """Replicas that exist and are not told to stop."""
    ready: int = 0
    unscheduled: int = 0
    """Replicas that wait for a node."""
    leaving: int = 0
    """Replicas told to stop that are still there."""
    surging: bool = False
    """It exchanges its replicas for ones of a new template and may have one more than desired while it does."""

    @classmethod
    def of(cls, name: str, stage: str, each: Capacity, states: Iterable[str]) -> Self:
        """Count replicas that are started and stopped one by one: those not told to stop are desired."""
        count = Counter(states)
        living = count["starting"] + count["ready"]
        leaving = count["draining"] + count["stopping"]
        return cls(name, stage, each, living, present=living, ready=count["ready"], leaving=leaving)

    @property
    def held(self) -> Capacity:
        """What its replicas ask for, or will as soon as they are made."""
        return self.each.times(max(self.desired + self.surging, self.present) + self.leaving)


def decide(
    targets: Sequence[Target], sets: Sequence[HostingSet], limit: Capacity, *, routed_anew: bool = True
) -> dict[str, int]:
    """The number of replicas each hosting set should be told to have, new ones included.

    Args:
        targets: what should run, one a stage.
        sets: every hosting set that exists.
        limit: most that all replicas may ask for.
        routed_anew: no router is left that knows stages which have no target any more.
    """
    known = {each.name for each in sets}
    missing = [HostingSet(t.name, t.stage, t.each, desired=0) for t in targets if t.name not in known]
    rollout = _RolloutStep([*sets, *missing], {target.stage: target for target in targets}, limit)
    rollout.give_up_what_found_no_node()
    spared = {target.stage for target in targets if not target.replicas and not rollout.replaced(target)}
    for target in targets:
        if target.stage not in spared:
            rollout.bring_up(target)
    unmet = [target for target in targets if rollout.desired[target.name] < target.replicas]
    rollout.retire(unmet, spared)
    rollout.retire_gone(unmet, routed_anew=routed_anew)
    if unmet and limit.holds(total(target.room for target in targets)) and not rollout.under_way(unmet):
        rollout.make_room(unmet)
    return rollout.desired


@dataclass(slots=True)
class _RolloutStep:
    """The numbers as they will be once what was decided so far is written."""

    sets: list[HostingSet]
    targets: Mapping[str, Target]
    limit: Capacity
    desired: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.desired = {each.name: each.desired for each in self.sets}

    @property
    def free(self) -> Capacity:
        """Room for more; what was only just told to go still counts."""
        added = (each.each.times(max(self.desired[each.name] - each.desired, 0)) for each in self.sets)
        return self.limit - total(each.held for each in self.sets) - total(added)

    @property
    def gone(self) -> list[HostingSet]:
        """The hosting sets of stages that the pipeline has no more."""
        return [each for each in self.sets if each.stage not in self.targets and self.desired[each.name]]

    def stale(self, stage: str) -> list[HostingSet]:
        """List the stage's hosting sets that the plan does not ask for."""
        wanted = self.targets[stage].name if stage in self.targets else None
        return [each for each in self.sets if each.stage == stage and each.name != wanted and self.desired[each.name]]

    def ready(self, stage: str) -> int:
        """Ready replicas of a stage that may stay, whichever set they are of."""
        return sum(min(each.ready, self.desired[each.name]) for each in self.sets if each.stage == stage)

    def give_up_what_found_no_node(self) -> None:
        """Where the limit is less than is held, take back replicas that wait for a node in vain."""
        waiting = [each for each in self.sets if each.unscheduled]
        for each in sorted(waiting, key=self.wanted):
            over = not self.limit.holds(total(s.held for s in self.sets))
            if over:
                self.desired[each.name] = max(each.desired - each.unscheduled, 0)

    def wanted(self, each: HostingSet) -> bool:
        """Whether the plan asks for this set."""
        return each.stage in self.targets and self.targets[each.stage].name == each.name

    def bring_up(self, target: Target) -> None:
        """Ask for what is missing, as far as there is room; take back what is too many."""
        desired = self.desired[target.name]
        if desired > target.replicas:
            self.desired[target.name] = target.replicas
        while self.desired[target.name] < target.replicas and self.free.holds(target.each):
            self.desired[target.name] += 1

    def replaced(self, idle: Target) -> bool:
        """Whether all other stages run as the plan asks, so that nothing needs this one any more, which it asks not."""
        return all(self.is_ready(target) for target in self.targets.values() if target is not idle and target.replicas)

    def retire(self, unmet: Sequence[Target], spared: Container[str]) -> None:
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

    def retire_gone(self, unmet: Sequence[Target], *, routed_anew: bool) -> None:
        """Let go of stages that are gone once nobody needs them, and before of what is not ready and in the way."""
        unneeded = routed_anew and all(map(self.is_ready, self.targets.values()))
        for each in self.gone:
            if unneeded:
                self.desired[each.name] = 0
            elif unmet:
                self.desired[each.name] = min(self.desired[each.name], each.ready)

    def is_ready(self, target: Target) -> bool:
        """Whether all replicas the plan asks for are ready."""
        return any(each.name == target.name and each.ready >= target.replicas for each in self.sets)

    def under_way(self, unmet: Sequence[Target]) -> bool:
        """Whether room may yet come of itself, or what was brought up last is not ready yet."""
        stages = {target.stage for target in unmet}
        return any(
            each.leaving
            or each.present > self.desired[each.name]
            or each.desired > self.desired[each.name]
            or (self.wanted(each) and each.ready < self.desired[each.name])
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
        spare = [each for each in (*self.gone, *(each for _, each in stale)) if self.ready(each.stage) > 1]
        heirs = [each for target, each in stale if (each.each + self.free).holds(target.each)]
        last = sorted((each for _, each in stale), key=lambda each: -each.each.cores)
        for each in sorted(spare, key=lambda each: -self.ready(each.stage)) or self.gone or heirs or last:
            self.desired[each.name] -= 1
            return


def surge_allowed(each: HostingSet, others: Sequence[HostingSet], limit: Capacity) -> bool:
    """Whether a set whose template changes may have one more replica meanwhile, rather than one less."""
    if each.surging:
        return True
    return (limit - each.held - total(other.held for other in others)).holds(each.each)
