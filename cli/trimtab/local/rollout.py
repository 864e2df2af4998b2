"""How a plan becomes true on one machine: which replicas to start, resize, drain and stop next. Pure.

How many replicas there should be is the rule of all runtimes, `trimtab_pipelines.rollout`; a replica that must go keeps
serving until those that follow it are ready and the router has moved.

A replica usually has every variant of its stage loaded. It may serve those its cores suffice for, so a change of
variant is a `Resize`: reserved cores change, the process keeps running.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from trimtab_pipelines import rollout
from trimtab_pipelines.backoff import pause_seconds
from trimtab_pipelines.rollout import Capacity, ReplicaGroupState, ReplicaState

DRAIN_LIMIT_SECONDS = 30.0
FIRST_BACKOFF_SECONDS = 0.5
LONGEST_BACKOFF_SECONDS = 30.0
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class StageTarget:
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
    """Seconds to wait before a start that follows this many failures in a row: after one it starts at once."""
    return pause_seconds(failures - 1, FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS)


def servable_variants(replica: Replica, target: StageTarget, cores_of: Mapping[str, float]) -> frozenset[str]:
    """Name the loaded variants that may run within the cores reserved; `cores_of` maps each variant to its request."""
    need = {**cores_of, target.variant: target.cores}
    fitting = {v for v in replica.variants if need.get(v, replica.cores) <= replica.cores + _TOLERANCE}
    return frozenset(fitting | {replica.variant})


def decide(
    targets: Sequence[StageTarget],
    replicas: Sequence[Replica],
    *,
    limit_cores: float,
    serving: Mapping[str, str],
    now: float,
    not_before: Mapping[str, float] | None = None,
) -> list[Action]:
    """What to do next.

    Args:
        targets: What should run, one a stage; together within `limit_cores`.
        replicas: Every process that exists, those being stopped included.
        limit_cores: Most cores all replicas may have reserved.
        serving: The variant the router sends each stage's batches to; absent where not known.
        now: Time in seconds, on the clock of `draining_since` and `not_before`.
        not_before: Earliest time of a stage's next start, after failures.
    """
    by_stage = {target.stage: target for target in targets}
    moved = {stage for stage, target in by_stage.items() if serving.get(stage, target.variant) == target.variant}
    actions: list[Action] = [Stop(r.name) for r in replicas if r.state == "draining" and _has_drained(r, now)]
    free_cores = limit_cores - sum(replica.cores for replica in replicas)
    resizes, after, promised_cores = _resize(targets, replicas, free_cores, moved)
    actions += resizes
    kinds = _kinds(after, by_stage)
    sets = [
        ReplicaGroupState.of(name, alike[0].stage, Capacity(alike[0].cores), (replica.state for replica in alike))
        for name, alike in kinds.items()
    ]
    # What the plan asks for is ready for what comes after it once the router has moved.
    seen = [replace(each, ready=0) if each.name in by_stage.keys() - moved else each for each in sets]
    wanted = [rollout.Target(t.stage, t.stage, t.replicas, Capacity(t.cores)) for t in targets]
    desired = rollout.decide(wanted, seen, Capacity(limit_cores - promised_cores))
    for each in sets:
        living = sorted((r for r in kinds[each.name] if _lives(r)), key=lambda replica: replica.state == "ready")
        actions += [_release(replica) for replica in living[: max(each.desired - desired[each.name], 0)]]
    had = {each.name: each.desired for each in sets}
    for target in targets:
        if now >= (not_before or {}).get(target.stage, 0.0):
            missing = desired[target.stage] - had.get(target.stage, 0)
            actions += [Start(target.stage, target.variant, target.cores)] * missing
    return actions


def _resize(
    targets: Sequence[StageTarget], replicas: Sequence[Replica], free_cores: float, moved: AbstractSet[str]
) -> tuple[list[Resize], list[Replica], float]:
    """Let replicas become what is missing, as far as there is room.

    A ready one shrinks once the router needs its cores no longer. Until then it counts as what it will become, so that
    none is started in its place, and the cores it will give back are not there yet.

    Returns:
        What to resize now, all replicas as they will be, and the cores that will be given back later.
    """
    resizes, after, promised_cores = [], {replica.name: replica for replica in replicas}, 0.0
    for target in targets:
        own = [replica for replica in replicas if replica.stage == target.stage and _lives(replica)]
        missing = target.replicas - sum(matches(replica, target) for replica in own)
        for replica in sorted(own, key=lambda replica: (replica.state != "ready", -replica.cores)):
            more_cores = target.cores - replica.cores
            if missing <= 0 or not is_resizable(replica, target) or more_cores > free_cores + _TOLERANCE:
                continue
            missing -= 1
            after[replica.name] = replace(replica, variant=target.variant, cores=target.cores)
            if more_cores < 0 and replica.state == "ready" and target.stage not in moved:
                promised_cores -= more_cores
            else:
                resizes.append(Resize(replica.name, target.variant, target.cores))
                free_cores -= more_cores
    return resizes, list(after.values()), promised_cores


def _kinds(replicas: Sequence[Replica], targets: Mapping[str, StageTarget]) -> dict[str, list[Replica]]:
    """Group replicas that are alike; those that the plan asks for have the name of their stage.

    Of the others, those that could be resized come last: they are let go last.
    """
    kinds: dict[str, list[Replica]] = {}
    for replica in sorted(replicas, key=lambda r: r.stage in targets and is_resizable(r, targets[r.stage])):
        target = targets.get(replica.stage)
        other = f"{replica.stage}, {replica.cores:g} cores, {' '.join(sorted(replica.variants))}"
        kinds.setdefault(replica.stage if target and matches(replica, target) else other, []).append(replica)
    return kinds


def _lives(replica: Replica) -> bool:
    return replica.state in {"starting", "ready"}


def _has_drained(replica: Replica, now: float) -> bool:
    since = now if replica.draining_since is None else replica.draining_since
    return replica.idle or now - since > DRAIN_LIMIT_SECONDS


def _release(replica: Replica) -> Action:
    """Drain a ready replica; one that never was ready has nothing to drain."""
    return MarkDraining(replica.name) if replica.state == "ready" else Stop(replica.name)


def matches(replica: Replica, target: StageTarget) -> bool:
    """Whether the replica is what the plan asks for: the variant is loaded, and these cores are reserved."""
    return target.variant in replica.variants and abs(replica.cores - target.cores) <= _TOLERANCE


def is_resizable(replica: Replica, target: StageTarget) -> bool:
    """Whether other cores would make it fit; a process keeps the number of threads it was started with."""
    same_threads = threads(replica.cores) == threads(target.cores)
    return target.variant in replica.variants and same_threads and not matches(replica, target)


def threads(cores: float) -> int:
    """Threads a replica computes with: its whole cores, at least one."""
    return max(1, int(cores + _TOLERANCE))
