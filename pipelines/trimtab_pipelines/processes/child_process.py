"""`ChildProcess`: a Trimtab module as a child process with a log file, a ready line and a reliable stop.

The ready line is one line of JSON with the ports of a router or a replica that has started.
"""

import asyncio
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TextIO, TypeVar

from pydantic import TypeAdapter, ValidationError

from trimtab_pipelines.errors import OperationFailed, UserError
from trimtab_pipelines.processes.parent_death import command_tied_to_parent

LOG_TAIL_BYTES = 2000
LINE_LIMIT_BYTES = 2**20
REJECTED = 2
"""Exit code of a process that rejects its input. The last line of its log names the input and the correction."""
SAFE_PATH = "PYTHONSAFEPATH"
"""Environment variable that keeps Python from importing modules of the working directory."""


@dataclass(frozen=True, slots=True)
class RouterPorts:
    """Ports of a router; `rest_port` is 0 behind a proxy."""

    rest_port: int
    admin_port: int


@dataclass(frozen=True, slots=True)
class ReplicaPorts:
    """Ports of a replica."""

    data_port: int
    http_port: int
    grpc_port: int


Ports = RouterPorts | ReplicaPorts
AnyPorts = TypeVar("AnyPorts", bound=Ports)


def print_ready_line(ports: Ports, output: TextIO | None = None) -> None:
    """Print the ready line, by default on standard output, which the parent process waits for."""
    output = output or sys.stdout
    output.write(json.dumps(asdict(ports)) + "\n")
    output.flush()


class StartError(OperationFailed):
    """A process did not start; the message names it and quotes its log."""


class InputRejected(StartError, UserError):
    """A process did not start because its input is invalid; the message is the process's own line."""


def start_error(code: int | None, log: Path, message: str) -> StartError:
    """The error of a process that ended with a code before it was ready."""
    lines = last_log_lines(log)
    if code == REJECTED and lines:
        return InputRejected(re.sub(r"^trimtab_\w+: ", "", lines.rpartition("\n")[2]))
    return StartError(f"{message}{lines}")


def command_options(**values: object) -> list[str]:
    """Write the options `--name value` of a command line; None omits an option."""
    given = [(name.replace("_", "-"), value) for name, value in values.items() if value is not None]
    return [word for name, value in given for word in (f"--{name}", str(value))]


class Process(Protocol):
    """What `ChildProcess` needs of asyncio.subprocess.Process."""

    pid: int
    stdout: asyncio.StreamReader | None

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class ChildProcess:
    """A running `python -m MODULE`. Standard output can be read line by line; standard error goes to a log file."""

    def __init__(self, process: Process, name: str, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    @classmethod
    async def start(
        cls,
        module: str,
        arguments: Sequence[str],
        log: Path,
        name: str,
        *,
        environment: Mapping[str, str] | None = None,
        is_read: bool = True,
    ) -> "ChildProcess":
        """Start a module that dies with this process, in its own session, so that Ctrl-C does not reach it directly.

        It imports nothing from its working directory, which belongs to the user. The log has standard error, and
        standard output unless that is read; a process whose output `is_read` blocks if nothing reads it.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *command_tied_to_parent(module, *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if is_read else errors,
                stderr=errors,
                env={**os.environ, SAFE_PATH: "1", **(environment or {})},
                start_new_session=True,
                limit=LINE_LIMIT_BYTES,
            )
        return cls(process, name, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative if a signal ended it; None while it runs."""
        return self._process.returncode

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def read_line(self) -> bytes:
        """Wait for the next line; empty once its output is closed."""
        if self._process.stdout is None:
            raise StartError(f"{self.name} has no standard output")
        return await self._process.stdout.readline()

    async def read_ready_line(self, kind: type[AnyPorts], timeout_seconds: float | None) -> AnyPorts:
        """Wait for the line with its ports; StartError if it ends, times out or prints another line."""
        try:
            async with asyncio.timeout(timeout_seconds):
                line = await self.read_line()
        except TimeoutError:
            raise StartError(
                f"{self.name} did not start within {timeout_seconds:g} s{last_log_lines(self._log)}"
            ) from None
        if not line:
            code = await self.wait()
            raise start_error(code, self._log, f"{self.name} stopped with exit code {code}")
        try:
            return TypeAdapter(kind).validate_json(line)
        except ValidationError:
            raise StartError(f"{self.name} printed {line[:80]!r}; expected its ports") from None

    def exit_message(self, code: int) -> str:
        return f"{self.name} stopped with exit code {code}{last_log_lines(self._log)}"

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self, patience_seconds: float) -> None:
        """Terminate it, and kill it if it does not end in time."""
        if self.running:
            with suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(patience_seconds):
                    await self._process.wait()
            except TimeoutError:
                self.kill()
        await self._process.wait()


def last_log_lines(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - LOG_TAIL_BYTES, 0))
            text = file.read().decode(errors="replace").strip()
    except OSError:
        return ""
    return f"; log:\n{text}" if text else ""
