"""Fork server: a process of one thread that imports modules once and forks processes that run them.

Usage: `python -m trimtab_pipelines.processes.fork_server SOCKET`; `forked_process` starts it and sends the requests.

Each forked process becomes a child of the process that sent the request, which must be a subreaper until the response:
the process in between ends at once. So the sender reads its exit status, and it outlives this server, but not the
sender. The server runs nothing but imports: threads, gRPC and CUDA do not survive a fork.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import socket
import struct
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

from trimtab_pipelines.processes.malloc_tuning import release_freed_memory
from trimtab_pipelines.processes.parent_death import die_with_parent
from trimtab_pipelines.processes.priority import lower_priority

SIZE = struct.Struct("!i")
"""Of the bytes of a request; in a response, the process id, or a negative error number."""
_POLL_SECONDS = 0.0005
_INITIAL_VARIABLES = frozenset(os.environ)


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """Modules to import before the fork, and the process to fork; without `module`, the server only imports."""

    imports: Sequence[str]
    module: str = ""
    """Run as by `python -m MODULE`."""
    arguments: Sequence[str] = ()
    environment: dict[str, str] | None = None
    folder: str = ""
    """Working directory."""

    def send(self, connection: socket.socket, files: Sequence[int]) -> None:
        """Send the request, and the descriptors of standard output and error."""
        message = json.dumps(asdict(self)).encode()
        socket.send_fds(connection, [SIZE.pack(len(message))], files)
        connection.sendall(message)

    @classmethod
    def receive(cls, connection: socket.socket) -> tuple[Self, list[int]] | None:
        """Wait for a request; None once the sender has ended."""
        header, files, _, _ = socket.recv_fds(connection, SIZE.size, 2)
        if not header:
            return None
        message = bytearray()
        (size,) = SIZE.unpack(header)
        while len(message) < size:
            chunk = connection.recv(size - len(message))
            if not chunk:
                return None
            message += chunk
        return cls(**json.loads(message)), files


def main() -> None:
    connection, sender = socket.socket(fileno=int(sys.argv[1])), os.getppid()
    while received := ForkRequest.receive(connection):
        request, files = received
        if new := [name for name in request.imports if name not in sys.modules]:
            _import(new)
        response = 0
        if request.module:
            try:
                response = _fork(request, files, connection, sender)
            except OSError as error:
                response = -(error.errno or 1)
        for file in files:
            os.close(file)
        connection.sendall(SIZE.pack(response))


def _import(names: Sequence[str]) -> None:
    """Import modules; one that fails is imported again by its process, which reports the error."""
    for name in names:
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(name)
    gc.collect()
    release_freed_memory()
    gc.freeze()  # else a collection in a forked process would copy all pages that it scans


def _fork(request: ForkRequest, files: Sequence[int], connection: socket.socket, sender: int) -> int:
    """Fork a process that the sender adopts; return its id."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            between = os.getpid()
            child = os.fork()
            if child == 0:
                connection.close()
                os.close(reader)
                os.close(writer)
                _run(request, files, between, sender)
            os.write(writer, SIZE.pack(child))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        response = answer.read()
    os.waitpid(between, 0)  # the sender has adopted the process before this returns
    if not response:
        raise BlockingIOError(11, "the second fork failed")
    (child,) = SIZE.unpack(response)
    return int(child)


def _run(request: ForkRequest, files: Sequence[int], between: int, sender: int) -> None:
    """Run the module in a forked process, and end it."""
    code = 1
    try:
        os.setsid()  # Ctrl-C in a terminal reaches only the sender
        lower_priority()
        while os.getppid() == between:
            time.sleep(_POLL_SECONDS)
        die_with_parent()
        if os.getppid() != sender:
            return
        for file, number in zip(files, (1, 2), strict=True):
            os.dup2(file, number)
            os.close(file)
        os.chdir(request.folder)
        _set_environment(request.environment or {})
        _seed()
        sys.argv = [request.module, *request.arguments]
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001  (logged, and the process ends)
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _set_environment(environment: dict[str, str]) -> None:
    """Set the variables of the sender; those that imports have set stay."""
    for name in _INITIAL_VARIABLES - environment.keys():
        os.environ.pop(name, None)
    os.environ.update(environment)
    folders = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


def _seed() -> None:
    """Seed anew what the forked processes would otherwise share; torch's default seed is constant by design."""
    random.seed()
    if "numpy.random" in sys.modules:  # loaded on first use
        sys.modules["numpy.random"].seed()


if __name__ == "__main__":
    main()
