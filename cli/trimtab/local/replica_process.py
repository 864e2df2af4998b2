"""Process of one replica, forked from a server that has imported torch and MLServer already.

A forked replica is ready in well under a second, while a new interpreter needs several seconds for these imports. The
fork server ends with this process; the kernel ends its children with it.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil

from trimtab.local import replica_main
from trimtab_pipelines.edge_settings import ReplicaIdentity
from trimtab_pipelines.processes.child_process import SAFE_PATH, ReplicaPorts

PRELOADED = ["trimtab_model_servers.server.replica", "trimtab.local.replica_main"]
STOP_TIMEOUT_SECONDS = 10.0
_WAITING = frozenset({psutil.STATUS_SLEEPING, psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_IDLE})

_starting = threading.Lock()
log = logging.getLogger(__name__)


class ReplicaProcess:
    """Process of one replica of the model in `folder`.

    `on_ready` is called once with its ports, `on_end` once when it has ended, for whatever reason.
    """

    def __init__(
        self,
        folder: Path,
        log: Path,
        on_ready: Callable[[ReplicaPorts], None],
        on_end: Callable[[], None],
        identity: ReplicaIdentity | None = None,
    ) -> None:
        self.folder, self.log, self._identity = folder, log, identity
        self._on_ready, self._on_end = on_ready, on_end
        self._loop = asyncio.get_running_loop()
        self._process: ForkServerProcess | None = None
        self._ports: Connection | None = None
        self._stopping = False
        self._deadline: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Process id; None before the fork."""
        return self._process.pid if self._process else None

    @property
    def exit_code(self) -> int | None:
        """Exit code; None before it has ended."""
        return self._process.exitcode if self._process else None

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

    async def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._ports, ports = context.Pipe(duplex=False)
        arguments = (str(self.folder), str(self.log), ports, self._identity)
        process = context.Process(target=replica_main.serve, args=arguments, name=self.folder.name, daemon=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            await asyncio.to_thread(_fork, process)  # the first fork waits for the fork server's imports
        except (OSError, EOFError) as error:  # the fork server died; the next start creates another
            log.warning("%s cannot be forked: %s", self.folder.name, error)
            self._ports.close()
            self._ended.set()
            self._on_end()
            return
        finally:
            ports.close()
        self._process = process
        self._loop.add_reader(self._ports.fileno(), self._read_ports)
        self._loop.add_reader(process.sentinel, self._end)
        if self._stopping:
            self.stop()

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after ten seconds; `on_end` is called when the process has ended."""
        self._stopping = True
        if self._process is None or self._ended.is_set():
            return
        self._signal(signal.SIGTERM)
        if self._deadline is None:
            self._deadline = self._loop.call_later(STOP_TIMEOUT_SECONDS, self._signal, signal.SIGKILL)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def wait(self) -> None:
        await self._ended.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is not None and not self._ended.is_set():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _read_ports(self) -> None:
        if self._ports is None:
            return
        self._loop.remove_reader(self._ports.fileno())
        try:
            ports = self._ports.recv()
        except (EOFError, OSError):
            return  # it ended before it was ready; `_end` is called too
        finally:
            self._ports.close()
            self._ports = None
        self._on_ready(ports)

    def _end(self) -> None:
        if self._process is None:
            return
        self._loop.remove_reader(self._process.sentinel)
        if self._ports is not None:
            self._loop.remove_reader(self._ports.fileno())
            self._ports.close()
            self._ports = None
        if self._deadline is not None:
            self._deadline.cancel()
        self._process.join()
        self._ended.set()
        self._on_end()


def start_fork_server(modules: Sequence[str] = ()) -> None:
    """Start the fork server before the first replica needs it; it imports what all replicas need, and `modules`."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED, *modules])
    _ensure_fork_server()


def _ensure_fork_server() -> None:
    """Start the fork server if it does not run, without the working directory on its import path."""
    with _starting:
        before = os.environ.get(SAFE_PATH)
        os.environ[SAFE_PATH] = "1"  # the fork server inherits this environment
        try:
            forkserver.ensure_running()
        finally:
            if before is None:
                del os.environ[SAFE_PATH]
            else:
                os.environ[SAFE_PATH] = before


def _fork(process: ForkServerProcess) -> None:
    _ensure_fork_server()
    process.start()


def stop_fork_server() -> None:
    """Kill the fork server; no replica can be started afterwards."""
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if "multiprocessing.forkserver" in " ".join(process.cmdline()):
                process.kill()
