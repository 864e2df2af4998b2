"""Supervisor: starts, restarts and stops every process of a pipeline on this machine.

It watches plan.json, moves the replicas towards the plan step by step, and keeps router, Envoy and adapter running.
docs/develop/how-it-works.md describes the files of the run folder.
"""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from trimtab.local.envoy_process import EnvoyPorts, make_sockets, start_envoy, wait_for_ports
from trimtab.local.process_upkeep import KILL_SECONDS, Upkeep, keep_logs_small, log_to_file
from trimtab.local.replica_manager import LocalSite, ReplicaManager
from trimtab.local.rollout import memory_bytes_per_replica
from trimtab.local.router_client import RouterClient, RouterUnreachable
from trimtab_model_servers.families.registry import modules_to_preload
from trimtab_pipelines.devices import visible_devices
from trimtab_pipelines.documents import (
    DocumentError,
    accept_plan,
    load_edge,
    load_pipeline,
    load_profiles,
    load_published_plan,
    pipeline_folder,
    write_json,
)
from trimtab_pipelines.memory_profile import with_measured_memory
from trimtab_pipelines.plan import PipelinePlan, plan_capacity
from trimtab_pipelines.processes.child_process import ChildProcess, RouterPorts, StartError, command_options
from trimtab_pipelines.processes.forked_process import preload
from trimtab_pipelines.processes.malloc_tuning import release_freed_memory
from trimtab_pipelines.profile import memory_by_stage
from trimtab_pipelines.router_state import RouterState
from trimtab_pipelines.spec import InferencePipeline
from trimtab_router.envoy.sockets import Sockets
from trimtab_router.file_changes import FileStamps, changes

log = logging.getLogger(__name__)

START_SECONDS = 60.0
READY_SECONDS, SLOW_READY_SECONDS = 300.0, 1800.0
STOP_SECONDS = 10.0
BUSY_POLL_SECONDS, CALM_POLL_SECONDS = 0.1, 0.5
MAX_ROUTER_TIMEOUTS = 3
"""Consecutive timeouts of two seconds after which a router that listens is considered hung."""
ADAPTER_HANG_SECONDS = 20.0
"""The adapter sends a heartbeat each second, except while it computes a plan."""
MAX_FAULTS = 1000
MODELS_FOLDER = "models"
OWN_FOLDERS = (MODELS_FOLDER, "logs")
"""Folders of a run folder that are removed with all that they contain, by the run or by the next one."""
MARK_FILE, MARK = ".trimtab", b"written by a trimtab run\n"
"""File, and how it begins, that marks a folder as created by a run."""


def is_marked(file: Path) -> bool:
    """Whether a file, not a link to one, begins with the mark."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.read(descriptor, len(MARK)) == MARK
    except OSError:
        return False
    finally:
        os.close(descriptor)


def create_own_folder(folder: Path) -> None:
    with suppress(FileExistsError):  # someone else's, which stays unmarked and is never removed
        folder.mkdir(parents=True)
        (folder / MARK_FILE).write_bytes(MARK)


def remove_own_folder(folder: Path) -> None:
    if is_marked(folder / MARK_FILE):
        shutil.rmtree(folder, ignore_errors=True)  # which refuses a link


@dataclass(frozen=True, slots=True)
class Setup:
    """What to run; port 0 becomes a free port."""

    pipeline_file: Path
    folder: Path
    """The run folder, created if missing; files of an earlier run are removed."""
    profiles_file: Path | None = None
    """Profiles for the adapter; None runs a fixed plan without an adapter."""
    plan: PipelinePlan | None = None
    """Initial plan; with an adapter, only until its first decision."""
    rest_port: int = 0
    grpc_port: int = 0
    prometheus: str | None = None
    """URL of the Prometheus from which the adapter reads the arrival rate, instead of from the router."""
    admin_port: int = 0
    """Port of the router's metrics, state and arrivals."""
    proxy: bool = True
    """Whether Envoy runs in front of the router; without it there is only REST."""
    edge: Path | None = None
    """Envoy's settings."""
    admin_keys: Path | None = None
    """Keys of clients that may register tasks."""
    home: Path | None = None
    """Base of the pipeline's relative paths; the folder of its file if None."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An unexpected end of a process, or another failure."""

    at: float
    """Unix time."""
    what: str
    detail: str = ""


def _require_devices(pipeline: InferencePipeline, devices: Sequence[str]) -> None:
    """Raise DocumentError if a stage has no variant for the GPUs of this machine."""
    for stage in pipeline.spec.stages:
        least = min(variant.resources.gpu for variant in stage.variants)
        if least > len(devices):
            message = f"its variants request {least} GPUs or more, and this machine has {len(devices)}"
            raise DocumentError(f"stage {stage.name}: {message}; add a variant with resources.gpu {len(devices)}")


@dataclass(slots=True)
class Supervisor:
    """A running pipeline: `async with Supervisor(setup) as supervisor: await supervisor.ready()`."""

    setup: Setup
    pipeline: InferencePipeline = field(init=False)
    devices: tuple[str, ...] = field(init=False)
    """CUDA devices of this machine."""
    replica_manager: ReplicaManager = field(init=False)
    plan: PipelinePlan | None = None
    state: RouterState | None = None
    """The router's last state; None while it does not respond."""
    faults: list[Fault] = field(default_factory=list)
    rest_port: int = 0
    grpc_port: int = 0
    admin_port: int = 0
    sockets: Sockets | None = None
    router: ChildProcess | None = None
    proxy: ChildProcess | None = None
    adapter: ChildProcess | None = None
    client: RouterClient = field(init=False)
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _first_ready: asyncio.Event = field(default_factory=asyncio.Event)
    _log: logging.FileHandler | None = None
    _router_timeouts: int = 0

    def __post_init__(self) -> None:
        self.pipeline, self.devices = load_pipeline(self.setup.pipeline_file), visible_devices()
        _require_devices(self.pipeline, self.devices)
        if self.setup.plan is not None:
            self.validate_plan(self.setup.plan)
        budget = self.pipeline.spec.budget
        limit = budget.cores + budget.surge_cores
        memory = memory_bytes_per_replica(self.pipeline, limit, psutil.virtual_memory().available)
        profiles = load_profiles(self.setup.profiles_file) if self.setup.profiles_file is not None else {}
        sized = with_measured_memory(self.pipeline, memory_by_stage(profiles))
        home = self.setup.home or pipeline_folder(self.setup.pipeline_file)
        identity = load_edge(self.setup.edge).replicas
        site = LocalSite(sized, home, self.setup.folder, limit, memory, identity, self.devices)
        self.replica_manager = ReplicaManager(
            site, time.monotonic, self._changed.set, self.record_fault, self.record_fault
        )

    @property
    def plan_file(self) -> Path:
        return self.setup.folder / "plan.json"

    @property
    def decisions_file(self) -> Path:
        """Every plan of the adapter."""
        return self.setup.folder / "decisions.jsonl"

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def ready(self, timeout_seconds: float | None = None) -> None:
        """Wait until the first plan is in force; raises StartError. Third-party servers may take long to load."""
        if timeout_seconds is None:
            stages = self.pipeline.spec.stages
            slow = any(variant.container is not None for stage in stages for variant in stage.variants)
            timeout_seconds = SLOW_READY_SECONDS if slow else READY_SECONDS
        ready = asyncio.create_task(self._first_ready.wait())
        try:
            async with asyncio.timeout(timeout_seconds):
                await asyncio.wait({ready, *self._tasks}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            logs_folder = self.setup.folder / "logs"
            raise StartError(f"the pipeline was not ready within {timeout_seconds:g} s; see {logs_folder}") from None
        finally:
            ready.cancel()
        self.raise_failure()

    def raise_failure(self) -> None:
        for task in self._tasks:
            if task.done() and not task.cancelled() and (failure := task.exception()) is not None:
                raise failure

    def validate_plan(self, plan: PipelinePlan) -> PipelinePlan:
        """Return the plan if it suits this pipeline and its budget; raises DocumentError."""
        accept_plan(plan, self.pipeline)
        gpus, devices = plan_capacity(plan, self.pipeline.spec).gpus, len(self.devices)
        if gpus > devices:
            raise DocumentError(f"spec.stages: the plan requests {gpus} GPUs, and this machine has {devices}")
        unknown = {stage.name for stage in plan.spec.stages} - {stage.name for stage in self.pipeline.spec.stages}
        if unknown:
            raise DocumentError(f"spec.stages: the pipeline has no stage {', '.join(sorted(unknown))}")
        return plan

    async def stop(self) -> None:
        """Stop every process, the router first so that it completes the requests it accepted."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        log.info("stopping")
        if self.router is not None:
            await self.router.stop(self.pipeline.spec.slo.drain_seconds)
        if self.admin_port:  # the router was started
            await self.client.close()
        stopping = [self.replica_manager.stop()]
        if self.proxy is not None:
            stopping.append(self.proxy.stop(STOP_SECONDS))
        if self.adapter is not None:
            stopping.append(self.adapter.stop(STOP_SECONDS))
        await asyncio.gather(*stopping)
        remove_own_folder(self.setup.folder / MODELS_FOLDER)
        if self.sockets is not None:
            shutil.rmtree(self.sockets.folder, ignore_errors=True)
        if self._log is not None:
            logging.getLogger("trimtab").removeHandler(self._log)
            self._log.close()

    async def _start(self) -> None:
        folder = self.setup.folder
        folder.mkdir(parents=True, exist_ok=True)
        for stale in (self.plan_file, self.replica_manager.site.endpoints_file):
            stale.unlink(missing_ok=True)
        if self.setup.profiles_file is not None:
            self.decisions_file.unlink(missing_ok=True)
        for name in OWN_FOLDERS:
            remove_own_folder(folder / name)
            create_own_folder(folder / name)
        self._log = log_to_file(folder / "logs" / "supervisor.log")
        if self.setup.plan is not None:
            write_json(self.plan_file, self.setup.plan)
            self._apply(self.setup.plan)
        self.replica_manager.write_endpoints()
        preload(modules_to_preload(self.pipeline))
        self._tasks.append(asyncio.create_task(self._reconcile(), name="rollout"))
        if self.setup.proxy:
            self.sockets = make_sockets()
        await self._start_router()
        if self.sockets is not None:
            await self._start_proxy()
            self._keep_running("proxy", lambda: self.proxy, self._start_proxy)
        self._tasks.append(asyncio.create_task(self._watch_plan(), name="plan"))
        self._tasks.append(asyncio.create_task(keep_logs_small(folder / "logs"), name="logs"))
        self._keep_running("router", lambda: self.router, self._start_router)
        if self.setup.profiles_file is not None:
            await self._start_adapter()
            self._keep_running("adapter", lambda: self.adapter, self._start_adapter, ADAPTER_HANG_SECONDS)
        release_freed_memory()  # of the imports, and of a profile

    async def _start_router(self) -> None:
        setup, site, sockets = self.setup, self.replica_manager.site, self.sockets
        arguments = command_options(
            pipeline=setup.pipeline_file,
            plan=self.plan_file,
            endpoints=site.endpoints_file,
            tasks=site.tasks,
            admin_keys=setup.admin_keys,
            admin_port=self.admin_port or setup.admin_port,
            edge=setup.edge,
            sockets=None if sockets is None else sockets.folder,
            rest_port=(self.rest_port or setup.rest_port) if sockets is None else None,
        )
        if sockets is None:
            arguments.append("--no-proxy")
        log_file = self.setup.folder / "logs" / "router.log"
        self._router_timeouts = -1000  # timeouts do not count until it listens
        self.router = await ChildProcess.start("trimtab_router", arguments, log_file, "the router")
        try:
            announced = await self.router.read_ready_line(RouterPorts, START_SECONDS)
        except StartError:
            await self.router.stop(STOP_SECONDS)  # a hung process would never be replaced
            raise
        self._router_timeouts = 0
        if self.sockets is None:
            self.rest_port = announced.rest_port
        if announced.admin_port != self.admin_port:
            self.admin_port = announced.admin_port
            self.client = RouterClient(self.admin_port)

    async def _start_proxy(self) -> None:
        if self.sockets is None:
            raise StartError("Envoy needs the sockets of its router")
        requested = EnvoyPorts(self.rest_port or self.setup.rest_port, self.grpc_port or self.setup.grpc_port)
        log_file = self.setup.folder / "logs" / "envoy.log"
        self.proxy = await start_envoy(self.setup.pipeline_file, self.sockets, self.setup.edge, requested, log_file)
        try:
            ports = await wait_for_ports(self.proxy, self.sockets, START_SECONDS)
        except StartError:
            await self.proxy.stop(STOP_SECONDS)
            raise
        self.rest_port, self.grpc_port = ports.rest_port, ports.grpc_port

    async def _start_adapter(self) -> None:
        arguments = command_options(
            pipeline=self.setup.pipeline_file,
            profiles=self.setup.profiles_file,
            plan=self.plan_file,
            decisions=self.decisions_file,
            router=self.client.url,
            prometheus=self.setup.prometheus,
            gpus=self.replica_manager.site.limit_gpus,
        )
        log_file = self.setup.folder / "logs" / "adapter.log"
        self.adapter = await ChildProcess.start("trimtab_adapter", [*arguments, "--heartbeat"], log_file, "the adapter")

    def _keep_running(
        self,
        name: str,
        current: Callable[[], ChildProcess | None],
        start: Callable[[], Awaitable[None]],
        hang_seconds: float | None = None,
    ) -> None:
        upkeep = Upkeep(name, current, start, self.record_fault, self._first_ready, hang_seconds)
        self._tasks.append(asyncio.create_task(upkeep.run(), name=name))

    def record_fault(self, what: str, detail: str = "") -> None:
        """Record a fault; a repeated one is recorded once, and the oldest are dropped."""
        log.warning("%s%s", what, f": {detail}" if detail else "")
        if not (self.faults and self.faults[-1].what == what and not detail):
            self.faults.append(Fault(time.time(), what, detail.strip("; ")))
            del self.faults[:-MAX_FAULTS]

    async def _watch_plan(self) -> None:
        stamps = FileStamps()
        async for _ in changes(self.setup.folder):
            if stamps.changed(self.plan_file):
                self._read_plan()

    def _read_plan(self) -> None:
        """Apply the plan on disk; an invalid one is logged, and the last valid plan stays in force."""
        try:
            plan = self.validate_plan(load_published_plan(self.plan_file))
        except DocumentError as error:
            log.warning("%s; the last valid plan stays in force", error)
            return
        if plan != self.plan:
            self._apply(plan)

    def _apply(self, plan: PipelinePlan) -> None:
        self.plan = plan
        self.replica_manager.set_plan(plan)
        self._changed.set()

    async def _reconcile(self) -> None:
        """Move the replicas towards the plan at each change; poll the router often during a rollout."""
        while True:
            self._changed.clear()
            await self._poll()
            if self.plan is not None:
                self.replica_manager.step(self._serving())
            for reason in self.replica_manager.start_errors.values():
                if not self._first_ready.is_set():
                    raise reason
            if self.replica_manager.settled and self.state is not None and self.state.ready:
                self._first_ready.set()
            calm = (
                self.replica_manager.settled
                and self._first_ready.is_set()
                and not self.replica_manager.has_unresponsive_replica
            )
            pause = min(
                CALM_POLL_SECONDS if calm else BUSY_POLL_SECONDS, self.replica_manager.next_start_at - time.monotonic()
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(max(pause, 0.01)):  # wait_for may swallow a cancellation (Python 3.11)
                    await self._changed.wait()

    def _serving(self) -> Mapping[str, str]:
        stages = self.state.stages.items() if self.state else ()
        return {name: stage.variant for name, stage in stages if stage.ready_replicas}

    async def _poll(self) -> None:
        if not self.admin_port:
            return
        known = self.state.rejections if self.state else {}
        try:
            self.state = await self.client.state()
        except RouterUnreachable as error:
            self.state = None
            log.debug("%s", error)
            await self._count_router_timeout()
            return
        self._router_timeouts = 0
        self.replica_manager.observe(self.state)
        for replica, reason in self.state.rejections.items():
            if replica not in known:
                self.record_fault(f"replica {replica} is not used", reason)

    async def _count_router_timeout(self) -> None:
        """Kill a router that listens but does not respond; it is restarted."""
        self._router_timeouts += 1
        if self._router_timeouts >= MAX_ROUTER_TIMEOUTS and self.router is not None and self.router.running:
            self.record_fault("the router hung", f"{MAX_ROUTER_TIMEOUTS} consecutive timeouts; it was killed")
            await self.router.stop(KILL_SECONDS)
