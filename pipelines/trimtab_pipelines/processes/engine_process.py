"""`EngineProcess`: a third-party server as a process of this machine.

The command of a container runs with `$(NAME)` replaced by its environment, as in a pod. `PORT` is a free port there.
"""

import asyncio
import os
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Self

from trimtab_pipelines.errors import backoff
from trimtab_pipelines.processes.child_process import ChildProcess, StartError
from trimtab_pipelines.processes.parent_death import EXEC_NICE, command_tied_to_parent
from trimtab_pipelines.variants import Container

HOST, PORT = "127.0.0.1", "PORT"
PROBE_SECONDS = 2.0
EMPTY: Mapping[str, str] = MappingProxyType({})
_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


def expand(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Replace `$(NAME)` by variables; an unknown one stays as it is, as in a pod."""
    return [_VARIABLE.sub(lambda match: environment.get(match[1], match[0]), word) for word in words]


class EngineProcess(ChildProcess):
    """The process of a container's command, in a process group of its own, all of which is stopped."""

    port: int
    address: str

    @classmethod
    async def start_command(
        cls, container: Container, folder: Path, log: Path, name: str, environment: Mapping[str, str] = EMPTY
    ) -> Self:
        """Start a command in a folder; it listens on a free port. Raises OSError if it cannot be started."""
        port = _free_port()
        environment = {**environment, PORT: str(port)}
        environment |= dict(zip(container.env, expand([*container.env.values()], environment), strict=True))
        command = expand([*container.command, *container.args], environment)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command_tied_to_parent(EXEC_NICE, *command),
                cwd=folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        engine = cls(process, name, log)
        engine.port, engine.address = port, f"{HOST}:{port}"
        return engine

    def kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, patience_seconds: float) -> None:
        await super().stop(patience_seconds)
        self.kill()  # what its main process has left

    async def ready(self, path: str, timeout_seconds: float | None = None) -> None:
        """Wait until the engine serves; StartError if it ends before, or is too slow."""
        ended = asyncio.ensure_future(self.wait())
        serving = asyncio.ensure_future(_wait_until_ready(self.port, path))
        try:
            await asyncio.wait({ended, serving}, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            serving.cancel()
            ended.cancel()
        if not self.running:
            raise StartError(self.exit_message(self.exit_code or 0))
        if not serving.done():
            raise StartError(f"{self.name} was not ready within {timeout_seconds:g} s")


async def _wait_until_ready(port: int, path: str) -> None:
    for pause_seconds in backoff(0.05, 1.0):
        if await _status(port, path) == 200:
            return
        await asyncio.sleep(pause_seconds)


async def _status(port: int, path: str) -> int:
    """HTTP status of a path; 0 without a response."""
    with suppress(OSError, TimeoutError, ValueError, IndexError):
        async with asyncio.timeout(PROBE_SECONDS):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {HOST}:{port}\r\nConnection: close\r\n\r\n".encode())
                return int((await reader.readline()).split()[1])
            finally:
                writer.close()
    return 0


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])
