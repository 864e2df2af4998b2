"""Rollout of a plan on one machine: which replicas to start, resize, drain and stop next.

`trimtab_pipelines.rollout` decides the number of replicas, as in every runtime. An old replica serves until its
successors are ready and the router uses them.

A replica loads every variant of its stage if memory allows, and may serve those that its cores suffice for. A change of
variant is then a `Resize`: the reserved cores change, the process continues.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from trimtab_pipelines import rollout
from trimtab_pipelines.errors import pause_seconds
from trimtab_pipelines.rollout import Capacity, ReplicaGroupState, ReplicaState
from trimtab_pipelines.spec import MIN_DRAIN_SECONDS, InferencePipeline
from trimtab_pipelines.stages import Stage

FIRST_BACKOFF_SECONDS = 0.5
LONGEST_BACKOFF_SECONDS = 30.0
MEMORY_SHARE = 0.6
"""Share of the available memory that replicas may use."""
_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class StageTarget:
    """Planned replicas of one replica group of a stage; the first target of a stage names its planned variant."""

    stage: str
    variant: str
    replicas: int
    cores: float
    gpus: int = 0

    @property
    def name(self) -> str:
        return f"{self.stage}: {self.variant}"


@dataclass(frozen=True, slots=True)
class Replica:
    """Observed replica: `variants` are loaded, `cores` are reserved for `variant`."""

    name: str
    stage: str
    variant: str
    variants: frozenset[str]
    cores: float
    state: ReplicaState
    devices: tuple[str, ...] = ()
    """CUDA devices that only this replica uses."""
    idle: bool = False
    """Whether it is draining and the router has no batch in flight on it."""
    draining_since: float | None = None

    @property
    def gpus(self) -> int:
        return len(self.devices)


@dataclass(frozen=True, slots=True)
class Start:
    """Start a replica for a variant."""

    stage: str
    variant: str
    cores: float
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class Resize:
    """Change the cores of a replica, for another of its loaded variants."""

    name: str
    variant: str
    cores: float


@dataclass(frozen=True, slots=True)
class MarkDraining:
    """Mark a replica so that the router sends it no new batch."""

    name: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the process of a replica."""

    name: str


Action = Start | Resize | MarkDraining | Stop


def backoff_seconds(failures: int) -> float:
    """Seconds to wait before the next start after consecutive failures; 0 after one."""
    return pause_seconds(failures - 1, FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS)


def servable_variants(replica: Replica, target: StageTarget, cores_of: Mapping[str, float]) -> frozenset[str]:
    """Return the loaded variants that the reserved cores suffice for; `cores_of` maps variants to requests."""
    need = {**cores_of, target.variant: target.cores}
    fitting = {v for v in replica.variants if need.get(v, replica.cores) <= replica.cores + _TOLERANCE}
    return frozenset(fitting | {replica.variant})


def decide(
    targets: Sequence[StageTarget],
    replicas: Sequence[Replica],
    *,
    limit_cores: float,
    limit_gpus: int = 0,
    serving: Mapping[str, str],
    now: float,
    not_before: Mapping[str, float] | None = None,
    drain_seconds: float = MIN_DRAIN_SECONDS,
) -> list[Action]:
    """Decide the next actions, given every replica with a process, including those being stopped.

    `targets` has one or more for each stage, `serving` the variant that the router uses, if known, `not_before` the
    earliest time of a stage's next start after failures. Times are seconds on one clock. After `drain_seconds` a
    draining replica is stopped, whatever it still serves.
    """
    planned = {target.stage: target.variant for target in reversed(targets)}
    unused = {f"{stage}: {v}" for stage, v in planned.items() if serving.get(stage, v) != v}
    actions: list[Action] = [Stop(r.name) for r in replicas if _has_drained(r, now, drain_seconds)]
    free_cores = limit_cores - sum(replica.cores for replica in replicas)
    resizes, after, pending_cores = _resize(targets, replicas, free_cores, unused)
    actions += resizes
    groups = _group(after, targets)
    sets = [
        ReplicaGroupState.of(name, alike[0].stage, _capacity(alike[0]), (replica.state for replica in alike))
        for name, alike in groups.items()
    ]
    # Until the router uses the planned variant's replicas, they do not count as ready successors.
    observed = [replace(group, ready=0) if group.name in unused else group for group in sets]
    group_targets = [rollout.Target(t.stage, t.name, t.replicas, _capacity(t)) for t in targets]
    desired = rollout.decide(group_targets, observed, Capacity(limit_cores - pending_cores, limit_gpus))
    for group in sets:
        live = sorted((r for r in groups[group.name] if _is_live(r)), key=lambda replica: replica.state == "ready")
        for replica in live[: max(group.desired - desired[group.name], 0)]:
            actions.append(MarkDraining(replica.name) if replica.state == "ready" else Stop(replica.name))
    current = {group.name: group.desired for group in sets}
    for target in targets:
        if now >= (not_before or {}).get(target.stage, 0.0):
            missing = desired[target.name] - current.get(target.name, 0)
            actions += [Start(target.stage, target.variant, target.cores, target.gpus)] * missing
    return actions


def free_devices(devices: Sequence[str], replicas: Iterable[Replica]) -> list[str]:
    """The devices of a machine that no replica uses."""
    used = {device for replica in replicas for device in replica.devices}
    return [device for device in devices if device not in used]


def _capacity(requested: StageTarget | Replica) -> Capacity:
    return Capacity(requested.cores, requested.gpus)


def _resize(
    targets: Sequence[StageTarget], replicas: Sequence[Replica], free_cores: float, unused: AbstractSet[str]
) -> tuple[list[Resize], list[Replica], float]:
    """Resize replicas to the target, as far as free cores allow.

    A ready replica shrinks for the planned variant once the router no longer needs its cores. Until then it counts as
    resized, so that no other is started in its place, and the cores it will release are not free yet. Returns the
    resizes to execute now, all replicas as they will be, and the cores that will be released later.
    """
    resizes, after, pending_cores = [], {replica.name: replica for replica in replicas}, 0.0
    assigned = assign(targets, [replica for replica in replicas if _is_live(replica)])
    missing = {target: target.replicas - sum(each == target for each in assigned.values()) for target in targets}
    for target in (*targets, *targets):  # again with the cores that other stages release
        live = [replica for replica in replicas if replica.stage == target.stage and _is_live(replica)]
        spare = [r for r in live if after[r.name] is r and assigned[r.name] is None]
        for replica in sorted(spare, key=lambda replica: (replica.state != "ready", -replica.cores)):
            more_cores = target.cores - replica.cores
            if missing[target] <= 0 or not is_resizable(replica, target) or more_cores > free_cores + _TOLERANCE:
                continue
            missing[target] -= 1
            after[replica.name] = replace(replica, variant=target.variant, cores=target.cores)
            if more_cores < 0 and replica.state == "ready" and target.name in unused:
                pending_cores -= more_cores
            else:
                resizes.append(Resize(replica.name, target.variant, target.cores))
                free_cores -= more_cores
    return resizes, list(after.values()), pending_cores


def _group(replicas: Sequence[Replica], targets: Sequence[StageTarget]) -> dict[str, list[Replica]]:
    """Group equal replicas; a group that matches a target has its name.

    Resizable groups come last, so that they are stopped last.
    """

    def resizable(replica: Replica) -> bool:
        return any(target.stage == replica.stage and is_resizable(replica, target) for target in targets)

    groups: dict[str, list[Replica]] = {}
    assigned = assign(targets, replicas)
    for replica in sorted(replicas, key=resizable):
        target = assigned[replica.name]
        other = f"{replica.stage}, {replica.cores:g} cores, {' '.join(sorted(replica.variants))}"
        groups.setdefault(other if target is None else target.name, []).append(replica)
    return groups


def assign(targets: Sequence[StageTarget], replicas: Sequence[Replica]) -> dict[str, StageTarget | None]:
    """Map each replica to the target that it counts for; None if it matches none.

    A replica that matches several counts for its own variant, or else for the first one with a replica missing.
    """
    missing, assigned = {target: target.replicas for target in targets}, dict[str, StageTarget | None]()
    for replica in sorted(replicas, key=lambda replica: not _is_live(replica)):
        fitting = [target for target in targets if target.stage == replica.stage and matches(replica, target)]
        fitting.sort(key=lambda target: (missing[target] <= 0, target.variant != replica.variant))
        assigned[replica.name] = fitting[0] if fitting else None
        if fitting:
            missing[fitting[0]] -= 1
    return assigned


def _is_live(replica: Replica) -> bool:
    return replica.state in {"starting", "ready"}


def _has_drained(replica: Replica, now: float, drain_seconds: float) -> bool:
    since = now if replica.draining_since is None else replica.draining_since
    return replica.state == "draining" and (replica.idle or now - since > drain_seconds)


def matches(replica: Replica, target: StageTarget) -> bool:
    """Whether the variant is loaded and the target's cores and GPUs are reserved."""
    same_gpus = target.gpus == replica.gpus
    return same_gpus and target.variant in replica.variants and abs(replica.cores - target.cores) <= _TOLERANCE


def is_resizable(replica: Replica, target: StageTarget) -> bool:
    """Whether a resize would make it match; the threads and GPUs of a process are fixed."""
    fixed = threads(replica.cores) == threads(target.cores) and replica.gpus == target.gpus
    return target.variant in replica.variants and fixed and not matches(replica, target)


def threads(cores: float) -> int:
    """Number of compute threads of a replica: its whole cores, at least one."""
    return max(1, int(cores + _TOLERANCE))


def memory_bytes_per_replica(pipeline: InferencePipeline, limit_cores: float, available_bytes: float) -> float:
    """Divide the memory by the maximum number of replicas that the cores allow."""
    min_cores = min(variant.resources.cpu for stage in pipeline.spec.stages for variant in stage.variants)
    max_replicas = max(int(limit_cores / min_cores + 1e-9), len(pipeline.spec.stages))
    return MEMORY_SHARE * available_bytes / max_replicas


def variants_to_load(stage: Stage, needed: str, memory_bytes: float) -> tuple[str, ...]:
    """Return the needed variant and those closest in accuracy, with as many GPUs, that fit; of a container only it."""
    reference = stage.variant(needed)
    if reference.container is not None:
        return (needed,)
    alike = [variant for variant in stage.variants if variant.resources.gpu == reference.resources.gpu]
    others = [variant for variant in alike if variant is not reference and variant.container is None]
    others.sort(key=lambda variant: (abs(variant.accuracy - reference.accuracy), variant.resources.memory))
    loaded, used = {needed}, reference.resources.memory
    for variant in others:
        if used + variant.resources.memory <= memory_bytes:
            loaded.add(variant.name)
            used += variant.resources.memory
    return tuple(variant.name for variant in stage.variants if variant.name in loaded)
