"""How a plan becomes true without losing a request: which replicas to start, resize, drain and stop next.

Make before break: a replica that must go keeps serving until those that follow it are ready and the router has moved.
Cores of all replicas together never pass the limit. Where the limit leaves no room, replicas are exchanged one by one,
and a stage loses its last ready replica only where nothing else could ever make room. Level-triggered: call `decide`
with what is true now, carry out what it returns, call it again when anything has changed.

A replica usually has every variant of its stage loaded. It may serve those its cores suffice for, so a change of
variant is a `Resize`: a change of what is reserved, of nothing that runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

ReplicaState = Literal["starting", "ready", "draining", "stopping"]
DRAIN_LIMIT_SECONDS = 30.0
FIRST_BACKOFF_SECONDS = 0.5
LONGEST_BACKOFF_SECONDS = 30.0
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class Target:
    """What a plan asks of one stage."""

    stage: str
    variant: str
    replicas: int
    cores: float


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica as observed: `variants` are loaded, `cores` reserved, `variant` is what they were reserved for."""

    name: str
    stage: str
    variant: str
    variants: frozenset[str]
    cores: float
    state: ReplicaState
    idle: bool = False
    """Draining, and the router is known to have no batch with it."""
    draining_since: float | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """Start a replica for this variant."""

    stage: str
    variant: str
    cores: float


@dataclass(frozen=True, slots=True)
class Resize:
    """Reserve other cores for a replica, for another of the variants it has loaded."""

    name: str
    variant: str
    cores: float


@dataclass(frozen=True, slots=True)
class MarkDraining:
    """Tell the router to give this replica no new batch."""

    name: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the replica's process."""

    name: str


Action = Start | Resize | MarkDraining | Stop


def backoff_seconds(failures: int) -> float:
    """Seconds to wait before a start that follows this many failures in a row: at once, then doubling."""
    if failures <= 1:
        return 0.0
    return float(min(FIRST_BACKOFF_SECONDS * 2 ** (min(failures, 32) - 2), LONGEST_BACKOFF_SECONDS))


def servable(replica: Replica, target: Target, cores_of: Mapping[str, float]) -> frozenset[str]:
    """Name the loaded variants that may run within the cores reserved; `cores_of` maps each variant to its request."""
    need = {**cores_of, target.variant: target.cores}
    fitting = {v for v in replica.variants if need.get(v, replica.cores) <= replica.cores + _TOLERANCE}
    return frozenset(fitting | {replica.variant})


def decide(  # noqa: PLR0913  (all that is true now, and the bound)
    targets: Sequence[Target],
    replicas: Sequence[Replica],
    *,
    limit_cores: float,
    serving: Mapping[str, str],
    now: float,
    not_before: Mapping[str, float] | None = None,
) -> list[Action]:
    """Return what to do next.

    Args:
        targets: What should run, one a stage; together within `limit_cores`.
        replicas: Every process that exists, those being stopped included.
        limit_cores: Most cores all replicas may have reserved.
        serving: The variant the router sends each stage's batches to; absent where not known.
        now: Time in seconds, on the clock of `draining_since` and `not_before`.
        not_before: Earliest time of a stage's next start, after failures.
    """
    rollout = _Rollout(list(replicas), limit_cores, serving, now, not_before or {})
    rollout.stop_drained({target.stage for target in targets})
    unmet = [target for target in targets if not rollout.bring_up(target)]
    for target in targets:
        rollout.retire(target)
    if unmet and not rollout.changes_under_way():
        rollout.make_room(unmet)
    return rollout.actions


@dataclass(slots=True)
class _Rollout:
    """The replicas as they will be once the actions gathered so far are carried out."""

    replicas: list[Replica]
    limit_cores: float
    serving: Mapping[str, str]
    now: float
    not_before: Mapping[str, float]
    actions: list[Action] = field(default_factory=list)
    held_back: bool = False
    """Whether a change waits for the router to move or for a backoff to pass."""

    @property
    def free_cores(self) -> float:
        return self.limit_cores - sum(replica.cores for replica in self.replicas) + _TOLERANCE

    def of(self, stage: str) -> list[Replica]:
        """List the stage's replicas that are neither draining nor stopping."""
        return [r for r in self.replicas if r.stage == stage and r.state in ("starting", "ready")]

    def ready(self, stage: str) -> list[Replica]:
        return [replica for replica in self.of(stage) if replica.state == "ready"]

    def stop_drained(self, stages: Iterable[str]) -> None:
        """Stop what has drained, and what no stage of the plan asks for."""
        for replica in list(self.replicas):
            if replica.stage not in stages and replica.state in ("starting", "ready"):
                self.release(replica)
            elif replica.state == "draining":
                since = self.now if replica.draining_since is None else replica.draining_since
                if replica.idle or self.now - since > DRAIN_LIMIT_SECONDS:
                    self.act(Stop(replica.name), replica, replace(replica, state="stopping"))

    def bring_up(self, target: Target) -> bool:
        """Resize and start what is missing, as far as there is room; tell whether nothing is missing any more."""
        missing = target.replicas - sum(fits(replica, target) for replica in self.of(target.stage))
        for replica in sorted(self.of(target.stage), key=lambda r: (r.state != "ready", -r.cores)):
            if missing > 0 and convertible(replica, target) and self.may_resize(replica, target):
                self.resize(replica, target)
                missing -= 1
        if missing > 0 and self.now < self.not_before.get(target.stage, 0.0):
            self.held_back = True
            return False
        while missing > 0 and not self.waits_for_resize(target, missing) and target.cores <= self.free_cores:
            self.actions.append(Start(target.stage, target.variant, target.cores))
            name = f"new {target.stage} {len(self.actions)}"
            loaded = frozenset({target.variant})
            self.replicas.append(Replica(name, target.stage, target.variant, loaded, target.cores, "starting"))
            missing -= 1
        return missing <= 0

    def waits_for_resize(self, target: Target, missing: int) -> bool:
        """Whether enough replicas will be had by shrinking once the router has moved, so that none need be started."""
        shrinking = [r for r in self.of(target.stage) if convertible(r, target) and r.cores > target.cores]
        waits = len(shrinking) >= missing and not self.moved(target)
        self.held_back |= waits
        return waits

    def may_resize(self, replica: Replica, target: Target) -> bool:
        """Growing needs room; shrinking waits until the router no longer needs the cores."""
        if target.cores > replica.cores:
            return target.cores - replica.cores <= self.free_cores
        return self.moved(target) or replica.state == "starting"

    def moved(self, target: Target) -> bool:
        return self.serving.get(target.stage, target.variant) == target.variant

    def retire(self, target: Target) -> None:
        """Let go of replicas beyond the number asked for, and of those that do not fit once enough others are ready."""
        fitting = [replica for replica in self.of(target.stage) if fits(replica, target)]
        fitting.sort(key=lambda replica: replica.state == "ready")
        for replica in fitting[: max(len(fitting) - target.replicas, 0)]:
            self.release(replica)
        enough = sum(fits(replica, target) for replica in self.ready(target.stage)) >= target.replicas
        for replica in self.of(target.stage):
            if fits(replica, target):
                continue
            if (enough and self.moved(target)) or (replica.state == "starting" and not convertible(replica, target)):
                self.release(replica)

    def changes_under_way(self) -> bool:
        """Whether room may yet come of itself."""
        return self.held_back or any(replica.state != "ready" for replica in self.replicas)

    def make_room(self, unmet: Sequence[Target]) -> None:
        """Give up one replica that does not fit: a spare one, else one whose place its heir can take."""
        targets = {target.stage: target for target in unmet}
        stale = [r for r in self.replicas if r.stage in targets and not fits(r, targets[r.stage])]
        spare = [replica for replica in stale if len(self.ready(replica.stage)) > 1]
        if spare:
            self.release(max(spare, key=lambda r: (not convertible(r, targets[r.stage]), len(self.ready(r.stage)))))
            return
        for replica in stale:
            target = targets[replica.stage]
            if replica.cores + self.free_cores >= target.cores:
                if convertible(replica, target):
                    self.resize(replica, target)
                else:
                    self.release(replica)
                return

    def resize(self, replica: Replica, target: Target) -> None:
        after = replace(replica, variant=target.variant, cores=target.cores)
        self.act(Resize(replica.name, target.variant, target.cores), replica, after)

    def release(self, replica: Replica) -> None:
        """Drain a ready replica; one that never was ready has nothing to drain."""
        if replica.state == "ready":
            self.act(MarkDraining(replica.name), replica, replace(replica, state="draining", draining_since=self.now))
        else:
            self.act(Stop(replica.name), replica, replace(replica, state="stopping"))

    def act(self, action: Action, before: Replica, after: Replica) -> None:
        self.actions.append(action)
        self.replicas[self.replicas.index(before)] = after


def fits(replica: Replica, target: Target) -> bool:
    """Whether the replica is what the plan asks for: the variant is loaded, and these cores are reserved."""
    return target.variant in replica.variants and abs(replica.cores - target.cores) <= _TOLERANCE


def convertible(replica: Replica, target: Target) -> bool:
    """Whether other cores would make it fit; a process keeps the number of threads it was started with."""
    same_threads = threads(replica.cores) == threads(target.cores)
    return target.variant in replica.variants and same_threads and not fits(replica, target)


def threads(cores: float) -> int:
    """Threads a replica computes with: its whole cores, at least one."""
    return max(1, int(cores + _TOLERANCE))
