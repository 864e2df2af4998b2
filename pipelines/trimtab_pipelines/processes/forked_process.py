"""Child processes that a fork server forks with their imports done: ready in a fraction of a second.

This process has one fork server, which starts with the first request and is replaced if it ends; the processes that it
has forked live on.
"""

import asyncio
import atexit
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path

from trimtab_pipelines.processes.child_process import LINE_LIMIT_BYTES, SAFE_PATH, ChildProcess
from trimtab_pipelines.processes.fork_server import SIZE, ForkRequest
from trimtab_pipelines.processes.parent_death import command_tied_to_parent

_PR_SET_CHILD_SUBREAPER = 36
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""Numpy's BLAS would start threads on import."""


class ForkServer:
    """A running fork server, and the thread that waits for its responses."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            command = command_tied_to_parent("trimtab_pipelines.processes.fork_server", str(theirs.fileno()))
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_ONE_THREAD | os.environ | {SAFE_PATH: "1"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._thread = ThreadPoolExecutor(1, "fork server")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def request(self, request: ForkRequest, files: Sequence[int] = ()) -> "Future[int]":
        """Import modules, then fork a process that has these files as output and error; the future is its id.

        OSError in the future: the server has ended, or cannot fork.
        """
        return self._thread.submit(self._request, request, files)

    async def fork(self, request: ForkRequest, files: Sequence[int]) -> int:
        """Fork a process; return its id. A cancelled call ends the server, whose other callers start another."""
        forking = self.request(request, files)
        try:
            return await asyncio.wrap_future(forking)
        except asyncio.CancelledError:
            self.stop()  # waits for the thread, which uses the files
            _kill(forking)
            raise

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.shutdown()
        self._connection.close()

    def _request(self, request: ForkRequest, files: Sequence[int]) -> int:
        self._exchange(ForkRequest(request.imports), ())
        if not request.module:
            return 0
        with _adopting_orphans():
            return self._exchange(request, files)

    def _exchange(self, request: ForkRequest, files: Sequence[int]) -> int:
        request.send(self._connection, files)
        response = self._connection.recv(SIZE.size, socket.MSG_WAITALL)
        if len(response) < SIZE.size:
            raise ConnectionResetError("the fork server has ended")
        (number,) = SIZE.unpack(response)
        if number < 0:
            raise OSError(-number, os.strerror(-number))
        return int(number)


class ForkedProcess:
    """A process forked for this one, which is its parent; as asyncio.subprocess.Process."""

    def __init__(self, pid: int, stdout: asyncio.StreamReader | None) -> None:
        self.pid, self.stdout = pid, stdout
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._handle = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._handle, self._reap)

    async def wait(self) -> int:
        await self._ended.wait()
        return self.returncode or 0

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.returncode is None:  # else its id may be of another process
            os.kill(self.pid, number)

    def _reap(self) -> None:
        self._loop.remove_reader(self._handle)
        os.close(self._handle)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()


def _kill(forking: "Future[int]") -> None:
    with contextlib.suppress(OSError, CancelledError):
        os.kill(forking.result(), signal.SIGKILL)
        os.waitpid(forking.result(), 0)


_current: ForkServer | None = None


def fork_server() -> ForkServer:
    """The fork server of this process; started if none runs. Call it from the thread of an event loop."""
    global _current  # noqa: PLW0603  (imports are of a process, and so is the server that has them)
    if _current is None or not _current.running:
        stop_fork_server()
        _current = ForkServer()
    return _current


def stop_fork_server() -> None:
    """Kill the fork server; processes that it has forked live on."""
    global _current  # noqa: PLW0603
    if _current is not None:
        _current.stop()
        _current = None


atexit.register(stop_fork_server)


def preload(modules: Sequence[str]) -> None:
    """Let the fork server import modules before the first process needs them."""
    if sys.platform.startswith("linux"):
        fork_server().request(ForkRequest(modules))


async def start_forked(
    module: str,
    arguments: Sequence[str],
    log: Path,
    name: str,
    *,
    imports: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    is_read: bool = True,
) -> ChildProcess:
    """As `ChildProcess.start`, by a fork of a process that has imported modules already; OSError if it fails twice."""
    if not sys.platform.startswith("linux"):  # only Linux hands a child over to another parent
        return await ChildProcess.start(module, arguments, log, name, environment=environment, is_read=is_read)
    log.parent.mkdir(parents=True, exist_ok=True)
    whole_environment = {**os.environ, SAFE_PATH: "1", **(environment or {})}
    request = ForkRequest(imports, module, arguments, whole_environment, str(Path.cwd()))
    with log.open("ab") as errors:
        if not is_read:
            pid = await _fork(request, [errors.fileno(), errors.fileno()])
            return ChildProcess(ForkedProcess(pid, None), name, log)
        reader, writer = os.pipe()
        output = os.fdopen(reader, "rb", 0)
        try:
            pid = await _fork(request, [writer, errors.fileno()])
        except BaseException:
            output.close()
            raise
        finally:
            os.close(writer)
    stdout = asyncio.StreamReader(LINE_LIMIT_BYTES)
    process = ForkedProcess(pid, stdout)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), output)
    return ChildProcess(process, name, log)


async def _fork(request: ForkRequest, files: Sequence[int]) -> int:
    server = fork_server()
    try:
        return await server.fork(request, files)
    except OSError:  # the server had ended
        server.stop()
        return await fork_server().fork(request, files)


_adopting = threading.Lock()


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Adopt orphaned descendants meanwhile: other orphans, which nothing would wait for, go to the system's init."""
    set_option = ctypes.CDLL(None, use_errno=True).prctl
    with _adopting:
        set_option(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            yield
        finally:
            set_option(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
