"""Upkeep of the child processes of a run: restarts of ended and hung ones, and bounds on the logs they append to."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trimtab.local.rollout import backoff_seconds
from trimtab_pipelines.processes.child_process import ChildProcess, StartError

log = logging.getLogger(__name__)

GRACE_SECONDS = 1.0
"""Time to read pending lines after a timeout: this process may have been suspended itself."""
KILL_SECONDS = 0.2
HEALTHY_SECONDS = 10.0
"""Time that a process runs before its failures no longer delay a restart."""
TRIM_SECONDS = 60.0
MAX_LOG_BYTES = 8 * 2**20
MAX_LOGS = 200
"""Maximum of logs: every replica that was started has one."""


@dataclass(frozen=True, slots=True)
class Upkeep:
    """Upkeep of a process that was started: another is started when it ends or sends no heartbeat."""

    name: str
    current: Callable[[], ChildProcess | None]
    start: Callable[[], Awaitable[None]]
    on_fault: Callable[[str, str], None]
    """Called with the fault and its details."""
    first_ready: asyncio.Event
    """Set once the run is ready; before that, a second failure ends it."""
    hang_seconds: float | None = None
    """Maximum time between heartbeats; None for a process without them."""

    async def run(self) -> None:
        """Restart the process until cancelled; raises StartError if it never starts."""
        failures, started_at = 0, time.monotonic()
        while True:
            process = self.current()
            if process is not None:
                code = await self._wait_for_exit(process)
                healthy = time.monotonic() - started_at > HEALTHY_SECONDS
                failures = 1 if healthy else failures + 1
                if not self.first_ready.is_set() and failures > 1:
                    raise StartError(process.exit_message(code))
                self.on_fault(f"the {self.name} ended", f"exit code {code}")
            await asyncio.sleep(backoff_seconds(failures))
            started_at = time.monotonic()
            try:
                await self.start()
            except (StartError, OSError) as error:
                log.warning("%s", error)

    async def _wait_for_exit(self, process: ChildProcess) -> int:
        if self.hang_seconds is None:
            return await process.wait()
        detail = f"no heartbeat for {self.hang_seconds:g} s; it was killed"
        return await wait_for_exit(process, self.hang_seconds, lambda: self.on_fault(f"{process.name} hung", detail))


async def wait_for_exit(process: ChildProcess, hang_seconds: float, on_hang: Callable[[], None]) -> int:
    """Return the exit code of a process whose lines are heartbeats; call `on_hang` before killing a hung one."""
    timeout_seconds = hang_seconds
    while True:
        line = await _next_line(process, timeout_seconds)
        if line is None and timeout_seconds < hang_seconds:
            on_hang()
            await process.stop(KILL_SECONDS)
        if line is None and process.running:
            timeout_seconds = min(GRACE_SECONDS, 0.5 * hang_seconds)
        elif line:
            timeout_seconds = hang_seconds
        else:
            return await process.wait()


async def _next_line(process: ChildProcess, timeout_seconds: float) -> bytes | None:
    """Return the next line, which is empty at the end of the output; None on timeout."""
    try:
        async with asyncio.timeout(timeout_seconds):
            return await process.read_line()
    except TimeoutError:
        return None


def log_to_file(path: Path) -> logging.FileHandler:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    runtime = logging.getLogger("trimtab")
    runtime.addHandler(handler)
    runtime.setLevel(logging.INFO)
    return handler


async def keep_logs_small(folder: Path) -> None:
    while True:
        await asyncio.sleep(TRIM_SECONDS)
        with suppress(OSError):  # tried again a minute later
            trim_logs(folder)


def trim_logs(folder: Path, max_bytes: int = MAX_LOG_BYTES, max_files: int = MAX_LOGS) -> None:
    """Truncate logs above `max_bytes` to their newer half, in whole lines; keep the `max_files` modified last."""
    logs = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
    for path in logs[: max(len(logs) - max_files, 0)]:
        path.unlink(missing_ok=True)
    for path in logs[-max_files:]:
        if path.stat().st_size > max_bytes:
            _keep_newer_half(path, max_bytes)


def _keep_newer_half(path: Path, max_bytes: int) -> None:
    """Truncate in place, since a process appends to the file; a line appended meanwhile is lost."""
    with path.open("r+b") as file:
        file.seek(-max_bytes // 2, 2)
        newer = file.read()
        file.seek(0)
        file.write(newer[newer.find(b"\n") + 1 :])
        file.truncate()
