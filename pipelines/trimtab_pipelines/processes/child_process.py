"""Shell: starts one of our modules as a process of its own, keeps its log, stops it for sure."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from trimtab_pipelines.errors import OperationFailed
from trimtab_pipelines.processes.parent_death import command_tied_to_parent
from trimtab_pipelines.processes.ready_line import Ports

LOG_TAIL_BYTES = 2000
LINE_LIMIT_BYTES = 2**20
SAFE_PATH = "PYTHONSAFEPATH"
"""The variable that keeps an interpreter, and those it starts, from importing what lies in the working directory."""
AnyPorts = TypeVar("AnyPorts", bound=Ports)


class StartError(OperationFailed):
    """A process that does not come up; the message names it and shows what it said last."""


class ChildProcess:
    """A running `python -m MODULE`. Its standard output can be read line by line; its errors go to a log file."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, log: Path) -> None:
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
        """Start a module that dies with us, in a session of its own so that Ctrl-C reaches it only through us.

        It imports nothing from the folder it is started in, which is a user's: a `queue.py` there is none of ours.

        Args:
            module: what `python -m` takes.
            arguments: of its command line.
            log: where its errors go; where nobody reads its output, that too.
            name: what messages call it.
            environment: variables beside ours.
            is_read: whether somebody reads all it writes to standard output; it stops where nobody does.
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
        """The process's id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.returncode is None

    async def line(self) -> bytes:
        """Wait for its next line; empty once it has closed its output."""
        if self._process.stdout is None:
            raise StartError(f"{self.name} has no standard output")
        return await self._process.stdout.readline()

    async def read_ready_line(self, kind: type[AnyPorts], timeout_seconds: float) -> AnyPorts:
        """Wait for the line that says where it listens; raises StartError where none or another comes."""
        try:
            async with asyncio.timeout(timeout_seconds):
                line = await self.line()
        except TimeoutError:
            raise StartError(
                f"{self.name} did not start within {timeout_seconds:g} s{last_log_lines(self._log)}"
            ) from None
        if not line:
            raise StartError(self.exit_message(await self.wait()))
        try:
            return TypeAdapter(kind).validate_json(line)
        except ValidationError:
            raise StartError(f"{self.name} said {line[:80]!r}; expected its ports") from None

    def exit_message(self, code: int) -> str:
        """Say how it ended, and what it said last."""
        return f"{self.name} stopped with exit code {code}{last_log_lines(self._log)}"

    async def wait(self) -> int:
        """Wait for its end; return its exit code."""
        return await self._process.wait()

    async def stop(self, patience_seconds: float) -> None:
        """Ask it to end, and kill it where it does not."""
        if self.running:
            with suppress(ProcessLookupError):
                self._process.terminate()
            try:
                async with asyncio.timeout(patience_seconds):
                    await self._process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self._process.kill()
        await self._process.wait()


def last_log_lines(log: Path) -> str:
    """Quote the end of a log for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - LOG_TAIL_BYTES, 0))
            text = file.read().decode(errors="replace").strip()
    except OSError:
        return ""
    return f"; it said:\n{text}" if text else ""
