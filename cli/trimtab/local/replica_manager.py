"""Replicas of a pipeline on this machine: starts and stops them, detects hangs, and writes their endpoints."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.local import rollout
from trimtab.local.replica_process import EndpointReplica, EngineReplica, ReplicaProcess
from trimtab.local.rollout import Action, MarkDraining, Replica, Resize, StageTarget, Start, Stop, variants_to_load
from trimtab_model_servers.families.registry import modules_to_preload
from trimtab_model_servers.server.settings import write_model_folder
from trimtab_pipelines.devices import DEVICES_VARIABLE
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.edge_settings import ReplicaIdentity
from trimtab_pipelines.endpoints import Endpoint, Endpoints, container_fields
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.processes.child_process import REJECTED, StartError, last_log_lines, start_error
from trimtab_pipelines.router_state import RouterState
from trimtab_pipelines.spec import InferencePipeline

log = logging.getLogger(__name__)

HEALTHY_SECONDS = 1.0
BUSY_CORES = 0.05
"""Minimum CPU usage of a process that is computing, in cores."""
IDLE_HANG_SECONDS = 0.6
"""Time after which an idle, unresponsive replica hangs: longer than reconnecting takes."""
BUSY_HANG_SECONDS = 20.0
"""Time after which a computing, unresponsive replica hangs."""
MAX_FAILED_STARTS = 3
MAX_EXIT_CODES = 16
"""Number of ended replicas whose exit codes are published."""


@dataclass(frozen=True, slots=True)
class HangDetector:
    """Unresponsive period of one replica. Times are monotonic seconds."""

    since: float
    busy_at: float
    """When the replica was last seen computing; `since` if never."""

    @classmethod
    def update(cls, previous: "HangDetector | None", now: float, *, computes: bool) -> "HangDetector":
        since = previous.since if previous else now
        return cls(since, now if computes or previous is None else previous.busy_at)

    def hangs(self, now: float) -> bool:
        return now - self.busy_at >= IDLE_HANG_SECONDS or now - self.since >= BUSY_HANG_SECONDS


@dataclass(frozen=True, slots=True)
class LocalSite:
    """A pipeline on this machine, and the folder and resources of its replicas."""

    pipeline: InferencePipeline
    pipeline_folder: Path
    """Base of relative storage URIs."""
    folder: Path
    """The run folder."""
    limit_cores: float
    """Maximum of cores that all replicas may reserve."""
    memory_bytes: float
    """Memory for the variants of one replica."""
    identity: ReplicaIdentity | None = None
    """Identity for mutual TLS between replicas and router."""
    devices: tuple[str, ...] = ()
    """CUDA devices of the machine."""

    @property
    def limit_gpus(self) -> int:
        return min(self.pipeline.spec.budget.gpus, len(self.devices))

    @property
    def endpoints_file(self) -> Path:
        return self.folder / "endpoints.json"

    @property
    def tasks(self) -> Path:
        return self.folder / "tasks"


@dataclass(slots=True)
class ManagedReplica:
    """One replica: its state in the rollout, its process, and its address once ready."""

    replica: Replica
    process: ReplicaProcess
    started_at: float
    ready_at: float | None = None
    address: str = ""
    hang_detector: HangDetector | None = None
    """Set while the router cannot use the replica."""
    cpu_sample: tuple[float, float] = (0.0, 0.0)
    """Time of the last check, and CPU seconds used by then."""
    hung: bool = False
    """Whether the replica was killed because it hung."""


@dataclass(slots=True)
class ReplicaManager:
    """The replicas of a pipeline; carries out the actions that `rollout` decides."""

    site: LocalSite
    clock: Callable[[], float]
    """Monotonic seconds."""
    on_change: Callable[[], None]
    """Called when a replica becomes ready or ends."""
    on_death: Callable[[str, str], None]
    """Called with a description and the last log lines when a replica ends unexpectedly."""
    on_error: Callable[[str], None] = log.warning
    """Called with the error of a write that failed."""
    targets: tuple[StageTarget, ...] = ()
    """Targets of the plan in force."""
    starts: int = 0
    """Number of replicas started so far."""
    start_errors: dict[str, StartError] = field(default_factory=dict)
    """By stage, the error of its replicas after MAX_FAILED_STARTS failed starts in a row."""
    _managed: dict[str, ManagedReplica] = field(default_factory=dict)
    _failures: dict[str, int] = field(default_factory=dict)
    _not_before: dict[str, float] = field(default_factory=dict)
    _exit_codes: dict[str, int] = field(default_factory=dict)
    _written_endpoints: Endpoints = field(default_factory=Endpoints)
    _starting: "set[asyncio.Task[None]]" = field(default_factory=set)

    @property
    def replicas(self) -> Sequence[Replica]:
        """Every replica with a process, including those being stopped."""
        return [managed.replica for managed in self._managed.values()]

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids of ready replicas, by replica name."""
        members = self._managed.items()
        return {name: m.process.pid for name, m in members if m.process.pid and m.replica.state == "ready"}

    @property
    def cores(self) -> float:
        return sum(replica.cores for replica in self.replicas)

    @property
    def next_start_at(self) -> float:
        """Time of the next start that backoff delays; infinity without one."""
        now = self.clock()
        return min((at for at in self._not_before.values() if at > now), default=float("inf"))

    @property
    def settled(self) -> bool:
        """Whether the ready replicas are exactly those of the plan."""
        stages = {target.stage for target in self.targets}
        ready = {replica.name for replica in self.replicas if replica.state == "ready"}
        assigned = rollout.assign(self.targets, self.replicas)
        counts = Counter(target for name, target in assigned.items() if name in ready)
        return (
            bool(self.targets)
            and sum(replica.stage in stages for replica in self.replicas) == sum(t.replicas for t in self.targets)
            and all(counts[target] == target.replicas for target in self.targets)
        )

    def set_plan(self, plan: PipelinePlan) -> None:
        self.targets = tuple(
            StageTarget(stage.name, group.variant, group.replicas, group.cores, variant.resources.gpu)
            for stage in plan.spec.stages
            for group in stage.groups
            for variant in [self.site.pipeline.spec.stage(stage.name).variant(group.variant)]
        )

    @property
    def has_unresponsive_replica(self) -> bool:
        """Whether the router cannot use a ready replica."""
        return any(managed.hang_detector for managed in self._managed.values())

    def observe(self, state: RouterState) -> None:
        """Update from the router's state which draining replicas are idle, and which ready ones are unresponsive."""
        for managed in self._managed.values():
            replica = managed.replica
            stage = state.stages.get(replica.stage)
            endpoint = stage.endpoints.get(replica.name) if stage else None
            if replica.state == "draining":
                idle = endpoint is not None and not endpoint.ready and not endpoint.inflight_batches
                managed.replica = replace(replica, idle=idle)
            elif replica.state == "ready":
                # A replica that the router rejects for its identity may work.
                self._check_hang(
                    managed, unresponsive=endpoint is not None and not endpoint.ready and not endpoint.rejection
                )

    def _check_hang(self, managed: ManagedReplica, *, unresponsive: bool) -> None:
        """Kill a replica that hangs; the rollout then starts another."""
        now, process = self.clock(), managed.process
        (previous_at, previous_seconds), cpu_seconds = managed.cpu_sample, process.cpu_seconds
        managed.cpu_sample = now, cpu_seconds
        if not unresponsive:
            managed.hang_detector = None
            return
        computes = not process.sleeps or cpu_seconds - previous_seconds > BUSY_CORES * (now - previous_at)
        managed.hang_detector = HangDetector.update(managed.hang_detector, now, computes=computes)
        if managed.hang_detector.hangs(now):
            managed.hung = True
            process.kill()

    def step(self, serving: Mapping[str, str]) -> Sequence[Action]:
        """Execute the next actions; `serving` is the variant that the router uses, by stage."""
        actions = rollout.decide(
            self.targets,
            self.replicas,
            limit_cores=self.site.limit_cores,
            limit_gpus=self.site.limit_gpus,
            serving=serving,
            now=self.clock(),
            not_before=self._not_before,
            drain_seconds=self.site.pipeline.spec.slo.drain_seconds,
        )
        for action in actions:
            log.info("%s", action)
            self._execute(action)
        self.write_endpoints()
        return actions

    def write_endpoints(self) -> None:
        """Write the endpoints file, which the router watches, if it changed."""
        stages = {stage.name: self._endpoints(stage.name) for stage in self.site.pipeline.spec.stages}
        if stages != self._written_endpoints.stages or not self.site.endpoints_file.exists():
            generation, exit_codes = self._written_endpoints.generation + 1, dict(self._exit_codes) or None
            listed = Endpoints(generation=generation, exit_codes=exit_codes, stages=stages)
            try:
                write_json(self.site.endpoints_file, listed)
            except OSError as error:
                self.on_error(f"the endpoints of replicas cannot be written: {error.strerror}")
                return
            self._written_endpoints = listed

    async def stop(self) -> None:
        members = list(self._managed.values())
        for managed in members:
            managed.replica = replace(managed.replica, state="stopping")
            managed.process.stop()
        for managed in members:
            await managed.process.wait()

    def _execute(self, action: Action) -> None:
        if isinstance(action, Start):
            self._start(action)
            return
        managed = self._managed[action.name]
        if isinstance(action, Resize):
            managed.replica = replace(managed.replica, variant=action.variant, cores=action.cores)
        elif isinstance(action, MarkDraining):
            managed.replica = replace(managed.replica, state="draining", draining_since=self.clock())
        elif isinstance(action, Stop):
            managed.replica = replace(managed.replica, state="stopping")
            self.write_endpoints()  # before the replica ends, so that the router does not see connection errors
            managed.process.stop()

    def _start(self, action: Start) -> None:
        site = self.site
        stage = site.pipeline.spec.stage(action.stage)
        variants = variants_to_load(stage, action.variant, site.memory_bytes)
        name = f"{action.stage}-{self.starts}"
        self.starts += 1
        devices = tuple(rollout.free_devices(site.devices, self.replicas)[: action.gpus])
        try:
            process = self._process(name, action, variants, devices)
        except OSError as error:
            self._failures[action.stage] = self._failures.get(action.stage, 1) + 1
            self._not_before[action.stage] = self.clock() + rollout.backoff_seconds(self._failures[action.stage])
            self.on_error(f"no replica of stage {action.stage} can be started: {error.strerror}")
            return
        loaded = frozenset(variants)
        replica = Replica(name, action.stage, action.variant, loaded, action.cores, "starting", devices)
        self._managed[name] = ManagedReplica(replica, process, self.clock())
        launch = asyncio.get_running_loop().create_task(process.run())
        self._starting.add(launch)
        launch.add_done_callback(self._starting.discard)

    def _process(self, name: str, action: Start, variants: Sequence[str], devices: Sequence[str]) -> ReplicaProcess:
        """Process of a replica, not started yet. Raises OSError if its folder cannot be written."""
        site, log_file = self.site, self.site.folder / "logs" / f"{name}.log"
        on_ready, on_end = partial(self._ready, name), partial(self._end, name)
        container = site.pipeline.spec.stage(action.stage).variant(action.variant).container
        if container is not None and container.endpoints:
            used = {m.process.address for m in self._managed.values() if isinstance(m.process, EndpointReplica)}
            addresses = [url.partition("://")[2] for url in container.endpoints]
            free = next((address for address in addresses if address not in used), addresses[0])
            return EndpointReplica(free, log_file, on_ready, on_end)
        environment = {DEVICES_VARIABLE: ",".join(devices)} if devices else {}
        if container is not None:
            return EngineReplica(container, site.pipeline_folder, log_file, on_ready, on_end, environment=environment)
        folder, tasks = site.folder / "models" / name, site.tasks / action.stage
        write_model_folder(
            site.pipeline, site.pipeline_folder, action.stage, variants, folder, action.cores, tasks=tasks
        )
        imports, identity = modules_to_preload(site.pipeline), site.identity
        return ReplicaProcess(folder, log_file, imports, on_ready, on_end, identity, environment=environment)

    def _ready(self, name: str, address: str) -> None:
        managed = self._managed[name]
        if managed.replica.state == "starting":
            managed.replica = replace(managed.replica, state="ready")
        managed.address, managed.ready_at = address, self.clock()
        log.info("%s is ready after %.2f s", name, self.clock() - managed.started_at)
        self.on_change()

    def _end(self, name: str) -> None:
        managed = self._managed.pop(name)
        if managed.replica.state != "stopping":
            self._record_failure(managed)
        if managed.process.exit_code is not None and not managed.hung:
            self._exit_codes[name] = managed.process.exit_code
            for oldest in list(self._exit_codes)[:-MAX_EXIT_CODES]:
                del self._exit_codes[oldest]
        self.write_endpoints()
        self.on_change()

    def _record_failure(self, managed: ManagedReplica) -> None:
        """Delay the next start if the replica failed within a second after it was ready, or before."""
        stage, now = managed.replica.stage, self.clock()
        healthy = managed.ready_at is not None and now - managed.ready_at > HEALTHY_SECONDS
        self._failures[stage] = 1 if healthy else self._failures.get(stage, 0) + 1
        self._not_before[stage] = now + rollout.backoff_seconds(self._failures[stage])
        log_lines = last_log_lines(managed.process.log)
        code = managed.process.exit_code
        if managed.ready_at is None and (code == REJECTED or self._failures[stage] >= MAX_FAILED_STARTS):
            message = f"stage {stage}: its replica does not start"
            self.start_errors[stage] = start_error(code, managed.process.log, message)
        if managed.hung:
            log_lines = f"it did not respond to the router; it was killed{log_lines}"
        self.on_death(f"replica {managed.replica.name} {'hung' if managed.hung else 'ended'}", log_lines)

    def _endpoints(self, stage: str) -> tuple[Endpoint, ...]:
        target = next((target for target in self.targets if target.stage == stage), None)
        cores_of = {variant.name: variant.resources.cpu for variant in self.site.pipeline.spec.stage(stage).variants}
        return tuple(
            Endpoint(
                name=replica.name,
                address=managed.address,
                variants=tuple(
                    sorted(rollout.servable_variants(replica, target, cores_of) if target else replica.variants)
                ),
                draining=replica.state == "draining",
                **self._container_fields(replica, managed.address),
            )
            for managed in self._managed.values()
            for replica in [managed.replica]
            if replica.stage == stage and replica.state in ("ready", "draining")
        )

    def _container_fields(self, replica: Replica, address: str) -> dict[str, Any]:
        """Fields of the endpoint of a third-party server; empty for a replica of ours."""
        container = self.site.pipeline.spec.stage(replica.stage).variant(replica.variant).container
        if container is None:
            return {}
        public = f"https://{address}" in container.endpoints
        fields = container_fields({replica.variant: container})
        return fields | {"tls": "Public" if public else "Off", "api_key_env": container.api_key_env}
