"""Shell: the replicas of a pipeline on this machine. Carries out what `rollout` decides, says where they listen."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trimtab.local import rollout
from trimtab.local.hang_detector import HangDetector
from trimtab.local.replica_process import ReplicaProcess
from trimtab.local.rollout import Action, MarkDraining, Replica, Resize, StageTarget, Start, Stop
from trimtab.local.variant_packing import variants_to_load
from trimtab_model_servers.settings import write_model_folder
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.edge_settings import ReplicaIdentity
from trimtab_pipelines.endpoints import Endpoint, Endpoints
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.processes.child_process import last_log_lines
from trimtab_pipelines.processes.ready_line import ReplicaPorts
from trimtab_pipelines.router_state import RouterState
from trimtab_pipelines.spec import InferencePipeline

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
HEALTHY_SECONDS = 1.0
COMPUTING_SHARE = 0.05
"""Of a core, what a process uses at the least that has something to do."""
MAX_FAILED_STARTS = 3
ENCODER_NICENESS = 5
"""Of replicas that encode images: words, whose first one is promised, wait for a processor behind nobody's images. In a
cluster the pods' CPU requests say who goes first."""


@dataclass(frozen=True, slots=True)
class LocalSite:
    """What the replicas belong to, and where their files go.

    Attributes:
        pipeline: what was asked.
        pipeline_folder: relative storage URIs start here.
        folder: the run folder.
        limit_cores: most cores all replicas may have reserved.
        memory_bytes: what the variants of one replica may need together.
        identity: what replicas and their router show each other.
    """

    pipeline: InferencePipeline
    pipeline_folder: Path
    folder: Path
    limit_cores: float
    memory_bytes: float
    identity: ReplicaIdentity | None = None

    @property
    def endpoints_file(self) -> Path:
        """Where the router reads which replicas there are."""
        return self.folder / "endpoints.json"

    @property
    def tasks(self) -> Path:
        """Where the router keeps the tasks that are registered while it runs."""
        return self.folder / "tasks"


@dataclass(slots=True)
class Member:
    """One replica: how the rollout sees it, its process, and where it listens once ready.

    `silence` is there while its router cannot use it; `computed` is when it was looked at last, and what it had
    computed by then, in seconds. `hung` says that it was killed for its silence.
    """

    replica: Replica
    process: ReplicaProcess
    started_at: float
    ready_at: float | None = None
    address: str = ""
    silence: HangDetector | None = None
    computed: tuple[float, float] = (0.0, 0.0)
    hung: bool = False


@dataclass(slots=True)
class ReplicaManager:
    """All replicas.

    Attributes:
        site: where they belong.
        clock: monotonic seconds.
        on_change: called when a replica became ready or ended.
        on_death: called when a replica ended unasked, with what happened and what it said.
        on_trouble: called with what the disk refuses.
        targets: what the plan in force asks for.
        starts: replicas started so far.
        hopeless: by stage, why its replicas never came up, once that has happened three times in a row.
    """

    site: LocalSite
    clock: Callable[[], float]
    on_change: Callable[[], None]
    on_death: Callable[[str, str], None]
    on_error: Callable[[str], None] = log.warning
    targets: tuple[StageTarget, ...] = ()
    starts: int = 0
    start_errors: dict[str, str] = field(default_factory=dict)
    _members: dict[str, Member] = field(default_factory=dict)
    _failures: dict[str, int] = field(default_factory=dict)
    _not_before: dict[str, float] = field(default_factory=dict)
    _listed: Endpoints = field(default_factory=Endpoints)
    _launches: "set[asyncio.Task[None]]" = field(default_factory=set)

    @property
    def replicas(self) -> Sequence[Replica]:
        """Every process that exists, those being stopped included."""
        return [member.replica for member in self._members.values()]

    @property
    def pids(self) -> Mapping[str, int]:
        """The process of each ready replica, by the replica's name."""
        members = self._members.items()
        return {name: m.process.pid for name, m in members if m.process.pid and m.replica.state == "ready"}

    @property
    def computed_seconds(self) -> Mapping[str, float]:
        """What each replica has computed so far, those that start or stop included."""
        return {name: member.process.cpu_seconds for name, member in self._members.items()}

    @property
    def cores(self) -> float:
        """Cores reserved now."""
        return sum(replica.cores for replica in self.replicas)

    @property
    def next_start_at(self) -> float:
        """When the next start becomes possible; infinity where none is held back."""
        now = self.clock()
        return min((at for at in self._not_before.values() if at > now), default=float("inf"))

    @property
    def settled(self) -> bool:
        """Whether every replica is ready and fits the plan, as many as it asks for."""
        return bool(self.targets) and all(
            [r.state == "ready" and rollout.matches(r, target) for r in self.replicas if r.stage == target.stage]
            == [True] * target.replicas
            for target in self.targets
        )

    def set_plan(self, plan: PipelinePlan) -> None:
        """Take a plan for the pipeline as what should run."""
        self.targets = tuple(StageTarget(s.name, s.variant, s.replicas, s.cores) for s in plan.spec.stages)

    @property
    def has_unresponsive_replica(self) -> bool:
        """Whether the router cannot use a replica that says it is ready."""
        return any(member.silence for member in self._members.values())

    def observe(self, state: RouterState) -> None:
        """Learn from the router which draining replicas have no batch left, and which ready ones it cannot use."""
        for member in self._members.values():
            replica = member.replica
            stage = state.stages.get(replica.stage)
            seen = stage.endpoints.get(replica.name) if stage else None
            if replica.state == "draining":
                idle = seen is not None and not seen.ready and not seen.inflight_batches
                member.replica = replace(replica, idle=idle)
            elif replica.state == "ready":
                # One that was refused for who it is says nothing of whether it works.
                self._listen(member, silent=seen is not None and not seen.ready and not seen.rejection)

    def _listen(self, member: Member, *, silent: bool) -> None:
        """Kill a replica that hangs; another takes its place as for any that ended."""
        now, process = self.clock(), member.process
        (before, computed_before), computed = member.computed, process.cpu_seconds
        member.computed = now, computed
        if not silent:
            member.silence = None
            return
        computes = not process.sleeps or computed - computed_before > COMPUTING_SHARE * (now - before)
        member.silence = HangDetector.update(member.silence, now, computes=computes)
        if member.silence.hangs(now):
            member.hung = True
            process.kill()

    def step(self, serving: Mapping[str, str]) -> Sequence[Action]:
        """Do what is next; `serving` is the variant the router sends each stage's batches to."""
        actions = rollout.decide(
            self.targets,
            self.replicas,
            limit_cores=self.site.limit_cores,
            serving=serving,
            now=self.clock(),
            not_before=self._not_before,
        )
        for action in actions:
            log.info("%s", action)
            self._carry_out(action)
        self.list_endpoints()
        return actions

    def list_endpoints(self) -> None:
        """Tell the router which replicas there are, where that has changed."""
        stages = {stage.name: self._endpoints(stage.name) for stage in self.site.pipeline.spec.stages}
        if stages != self._listed.stages or not self.site.endpoints_file.exists():
            listed = Endpoints(generation=self._listed.generation + 1, stages=stages)
            try:
                write_json(self.site.endpoints_file, listed)
            except OSError as error:
                self.on_error(f"the router is not told of a change of replicas: {error.strerror}")
                return
            self._listed = listed

    async def stop(self) -> None:
        """Stop them all and wait until they are gone."""
        members = list(self._members.values())
        for member in members:
            member.replica = replace(member.replica, state="stopping")
            member.process.stop()
        for member in members:
            await member.process.ended()

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Start):
            self._start(action)
            return
        member = self._members[action.name]
        if isinstance(action, Resize):
            member.replica = replace(member.replica, variant=action.variant, cores=action.cores)
        elif isinstance(action, MarkDraining):
            member.replica = replace(member.replica, state="draining", draining_since=self.clock())
        elif isinstance(action, Stop):
            member.replica = replace(member.replica, state="stopping")
            self.list_endpoints()  # before it goes, so that the router needs not find out
            member.process.stop()

    def _start(self, action: Start) -> None:
        site = self.site
        stage = site.pipeline.spec.stage(action.stage)
        variants = variants_to_load(stage, action.variant, site.memory_bytes)
        name = f"{action.stage}-{self.starts}"
        self.starts += 1
        folder = site.folder / "models" / name
        try:
            write_model_folder(
                site.pipeline,
                site.pipeline_folder,
                action.stage,
                variants,
                folder,
                action.cores,
                tasks=site.tasks / action.stage,
            )
        except OSError as error:
            self._failures[action.stage] = self._failures.get(action.stage, 1) + 1
            self._not_before[action.stage] = self.clock() + rollout.backoff_seconds(self._failures[action.stage])
            self.on_error(f"no replica of stage {action.stage} is started: {error.strerror}")
            return
        words = site.folder / "logs" / f"{name}.log"
        process = ReplicaProcess(
            folder,
            words,
            lambda ports: self._ready(name, ports),
            lambda: self._end(name),
            site.identity,
            ENCODER_NICENESS if stage.encodes else 0,
        )
        replica = Replica(name, action.stage, action.variant, frozenset(variants), action.cores, "starting")
        self._members[name] = Member(replica, process, self.clock())
        launch = asyncio.get_running_loop().create_task(process.start())
        self._launches.add(launch)
        launch.add_done_callback(self._launches.discard)

    def _ready(self, name: str, ports: ReplicaPorts) -> None:
        member = self._members[name]
        if member.replica.state == "starting":
            member.replica = replace(member.replica, state="ready")
        member.address, member.ready_at = f"{HOST}:{ports.data_port}", self.clock()
        log.info("%s is ready after %.2f s", name, self.clock() - member.started_at)
        self.on_change()

    def _end(self, name: str) -> None:
        member = self._members.pop(name)
        if member.replica.state != "stopping":
            self._note_failure(member)
        self.list_endpoints()
        self.on_change()

    def _note_failure(self, member: Member) -> None:
        """Start another at once, unless it did not even live for a second after it was ready."""
        stage, now = member.replica.stage, self.clock()
        healthy = member.ready_at is not None and now - member.ready_at > HEALTHY_SECONDS
        self._failures[stage] = 1 if healthy else self._failures.get(stage, 0) + 1
        self._not_before[stage] = now + rollout.backoff_seconds(self._failures[stage])
        words = last_log_lines(member.process.log)
        if member.ready_at is None and self._failures[stage] >= MAX_FAILED_STARTS:
            self.start_errors[stage] = f"stage {stage}: its replica does not start{words}"
        if member.hung:
            words = f"the router had no answer from it, and it computed nothing; it was killed{words}"
        self.on_death(f"replica {member.replica.name} {'hung' if member.hung else 'ended'}", words)

    def _endpoints(self, stage: str) -> tuple[Endpoint, ...]:
        target = next((target for target in self.targets if target.stage == stage), None)
        cores_of = {variant.name: variant.resources.cpu for variant in self.site.pipeline.spec.stage(stage).variants}
        return tuple(
            Endpoint(
                name=replica.name,
                address=member.address,
                variants=tuple(
                    sorted(rollout.servable_variants(replica, target, cores_of) if target else replica.variants)
                ),
                draining=replica.state == "draining",
            )
            for member in self._members.values()
            for replica in [member.replica]
            if replica.stage == stage and replica.state in ("ready", "draining")
        )
