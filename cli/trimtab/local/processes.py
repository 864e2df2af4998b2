"""Shell: starts one of our modules as a process of its own, keeps its log, stops it for sure."""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LOG_TAIL_BYTES = 2000
LINE_LIMIT_BYTES = 2**20


class StartError(Exception):
    """A process that does not come up; the message names it and shows what it said last."""


class Module:
    """A running `python -m MODULE`. Its standard output can be read line by line; its errors go to a log file."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, log: Path) -> None:
        self.name = name
        self._process = process
        self._log = log

    @classmethod
    async def start(cls, module: str, arguments: Sequence[str], log: Path, name: str) -> "Module":
        """Start a module that dies with us, in a session of its own so that Ctrl-C reaches it only through us."""
        command = [sys.executable, "-m", "trimtab.local.leash", str(os.getpid()), module, *arguments]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
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

    async def announcement(self, timeout_seconds: float) -> bytes:
        """Wait for the line that says it listens; raises StartError where none comes."""
        try:
            async with asyncio.timeout(timeout_seconds):
                line = await self.line()
        except TimeoutError:
            raise StartError(f"{self.name} did not start within {timeout_seconds:g} s{said(self._log)}") from None
        if not line:
            raise StartError(self.obituary(await self.wait()))
        return line

    def obituary(self, code: int) -> str:
        """Say how it ended, and what it said last."""
        return f"{self.name} stopped with exit code {code}{said(self._log)}"

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


def said(log: Path) -> str:
    """Quote the end of a log for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - LOG_TAIL_BYTES, 0))
            text = file.read().decode(errors="replace").strip()
    except OSError:
        return ""
    return f"; it said:\n{text}" if text else ""
