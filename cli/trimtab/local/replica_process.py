"""Process of one replica, forked from a process that has imported what its model server needs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import psutil

from trimtab_pipelines.edge_settings import ReplicaIdentity
from trimtab_pipelines.processes.child_process import ChildProcess, ReplicaPorts, StartError, command_options
from trimtab_pipelines.processes.engine_process import HOST, EngineProcess
from trimtab_pipelines.processes.forked_process import start_forked
from trimtab_pipelines.variants import Container

STOP_TIMEOUT_SECONDS = 10.0
_WAITING = frozenset({psutil.STATUS_SLEEPING, psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_IDLE})

log = logging.getLogger(__name__)


class ReplicaProcess:
    """Process of one replica of the model in `folder`; `imports` are modules that it needs.

    `on_ready` is called once with its address, `on_end` once when it has ended, for whatever reason.
    """

    def __init__(
        self,
        folder: Path,
        log: Path,
        imports: Sequence[str],
        on_ready: Callable[[str], None],
        on_end: Callable[[], None],
        identity: ReplicaIdentity | None = None,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        self._folder, self._imports, self._identity = folder, imports, identity
        self._environment = environment
        self._on_ready, self._on_end = on_ready, on_end
        self._child: ChildProcess | None = None
        self._stopping = False
        self._stop: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Process id; None before the fork."""
        return self._child.pid if self._child else None

    @property
    def exit_code(self) -> int | None:
        """Exit code; None before it has ended."""
        return self._child.exit_code if self._child else None

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds used by all threads; 0 once the process has ended."""
        try:
            times = psutil.Process(self.pid).cpu_times() if self.pid else None
        except psutil.Error:
            return 0.0
        return times.user + times.system if times else 0.0

    @property
    def sleeps(self) -> bool:
        """Whether the process waits for an event or is stopped, rather than runnable."""
        try:
            return psutil.Process(self.pid).status() in _WAITING if self.pid else True
        except psutil.Error:
            return True

    async def run(self) -> None:
        """Start the process, and wait until it has ended."""
        try:
            child, address = await self._start()
        except OSError as error:
            log.warning("%s cannot be started: %s", self._folder.name, error)
        else:
            self._child = child
            if self._stopping:
                self.stop()
            try:
                self._on_ready(await address)
            except StartError as error:
                log.debug("%s", error)
            await child.wait()
        self._ended.set()
        self._on_end()

    async def _start(self) -> tuple[ChildProcess, Awaitable[str]]:
        """Start the process; its address comes when it is ready, or StartError."""
        identity = self._identity.model_dump_json() if self._identity else None
        arguments, name = [str(self._folder), *command_options(identity=identity)], self._folder.name
        child = await start_forked(
            "trimtab_model_servers", arguments, self.log, name, imports=self._imports, environment=self._environment
        )

        async def address() -> str:
            return f"{HOST}:{(await child.read_ready_line(ReplicaPorts, None)).data_port}"

        return child, address()

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after ten seconds; `on_end` is called when the process has ended."""
        self._stopping = True
        if self._child is not None and self._stop is None:
            self._stop = asyncio.get_running_loop().create_task(self._child.stop(STOP_TIMEOUT_SECONDS))

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()

    async def wait(self) -> None:
        await self._ended.wait()


class EngineReplica(ReplicaProcess):
    """Process of a third-party server; `folder` is its working directory."""

    def __init__(
        self,
        container: Container,
        folder: Path,
        log: Path,
        on_ready: Callable[[str], None],
        on_end: Callable[[], None],
        *,
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(folder, log, (), on_ready, on_end, environment=environment)
        self._container = container

    @property
    def sleeps(self) -> bool:
        """False: it may compute in other processes, and counts as hung only after a while."""
        return False

    async def _start(self) -> tuple[ChildProcess, Awaitable[str]]:
        name, environment = self.log.stem, self._environment or {}
        engine = await EngineProcess.start_command(self._container, self._folder, self.log, name, environment)

        async def address() -> str:
            await engine.ready(self._container.ready_path)
            return engine.address

        return engine, address()


class EndpointReplica(ReplicaProcess):
    """A server that runs elsewhere: it is used, and never stopped."""

    def __init__(self, address: str, log: Path, on_ready: Callable[[str], None], on_end: Callable[[], None]) -> None:
        super().__init__(log.parent, log, (), on_ready, on_end)
        self.address = address

    @property
    def sleeps(self) -> bool:
        return False

    async def run(self) -> None:
        self._on_ready(self.address)
        await self._ended.wait()
        self._on_end()

    def stop(self) -> None:
        self._ended.set()
