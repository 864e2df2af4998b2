"""Shell: starts replicas by forking a process that has imported everything already, and notices how they end.

A replica started this way is ready in well under a second, where a fresh interpreter needs several to import torch and
MLServer. The fork server ends with us; its children are tied to it by the kernel.
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
from trimtab_pipelines.processes.child_process import SAFE_PATH
from trimtab_pipelines.processes.ready_line import ReplicaPorts

PRELOADED = ["trimtab_model_servers.server", "trimtab.local.replica_main"]
STOP_PATIENCE_SECONDS = 10.0
_WAITING = frozenset({psutil.STATUS_SLEEPING, psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_IDLE})

_starting = threading.Lock()
log = logging.getLogger(__name__)


class ReplicaProcess:
    """One replica's process.

    Args:
        folder: what it serves.
        log: where what it says goes.
        on_ready: called once with its ports.
        on_end: called once when it has ended, whatever the reason.
        identity: what it and its router show each other.
        niceness: how much it gives way to others where processors are short.
    """

    def __init__(
        self,
        folder: Path,
        log: Path,
        on_ready: Callable[[ReplicaPorts], None],
        on_end: Callable[[], None],
        identity: ReplicaIdentity | None = None,
        niceness: int = 0,
    ) -> None:
        self.folder, self.log, self._identity, self._niceness = folder, log, identity, niceness
        self._on_ready, self._on_end = on_ready, on_end
        self._loop = asyncio.get_running_loop()
        self._process: ForkServerProcess | None = None
        self._ports: Connection | None = None
        self._stopping = False
        self._deadline: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """The process's id; None before it has one."""
        return self._process.pid if self._process else None

    @property
    def cpu_seconds(self) -> float:
        """What it has computed so far, over all threads; 0 where it is gone."""
        try:
            times = psutil.Process(self.pid).cpu_times() if self.pid else None
        except psutil.Error:
            return 0.0
        return times.user + times.system if times else 0.0

    @property
    def sleeps(self) -> bool:
        """Whether it neither runs nor would if it had a processor: it waits for an event, or was stopped."""
        try:
            return psutil.Process(self.pid).status() in _WAITING if self.pid else True
        except psutil.Error:
            return True

    async def start(self) -> None:
        """Fork it."""
        context = multiprocessing.get_context("forkserver")
        self._ports, ports = context.Pipe(duplex=False)
        asked = (str(self.folder), str(self.log), ports, self._identity, self._niceness)
        process = context.Process(target=replica_main.serve, args=asked, name=self.folder.name, daemon=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            await asyncio.to_thread(_fork, process)  # the first one waits for the fork server's imports
        except (OSError, EOFError) as error:  # the fork server has just died; the next start makes another
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
        """Ask it to end, and kill it where it has not within ten seconds. `on_end` tells when it is gone."""
        self._stopping = True
        if self._process is None or self._ended.is_set():
            return
        self._signal(signal.SIGTERM)
        if self._deadline is None:
            self._deadline = self._loop.call_later(STOP_PATIENCE_SECONDS, self._signal, signal.SIGKILL)

    def kill(self) -> None:
        """End it at once; it is one that would not heed being asked."""
        self._signal(signal.SIGKILL)

    async def ended(self) -> None:
        """Wait until it is gone."""
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
            return  # it ended before it was ready; the sentinel tells
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
    """Let the fork server begin its imports, so that the first replica need not wait for all of them.

    Args:
        modules: what this pipeline's replicas import beside what all do.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED, *modules])
    _ensure_fork_server()


def _ensure_fork_server() -> None:
    """Start it where it does not run; like our other processes it imports nothing from the working directory."""
    with _starting:
        before = os.environ.get(SAFE_PATH)
        os.environ[SAFE_PATH] = "1"  # it takes nothing but our own environment
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
    """End the fork server rather than let it notice that we have ended; this process can start no replica after it."""
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if "multiprocessing.forkserver" in " ".join(process.cmdline()):
                process.kill()
