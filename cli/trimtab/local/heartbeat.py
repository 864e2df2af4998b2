"""Detection of a hung child process by its heartbeat."""

import asyncio
from collections.abc import Callable

from trimtab_pipelines.processes.child_process import ChildProcess

GRACE_SECONDS = 1.0
"""Time to read pending lines after a timeout: this process may have been suspended itself."""
KILL_SECONDS = 0.2


async def wait_for_exit(process: ChildProcess, hang_seconds: float, on_hang: Callable[[], None]) -> int:
    """Wait for the end of a process, each line of which is a heartbeat; return its exit code.

    Args:
        process: the process.
        hang_seconds: maximum time between heartbeats.
        on_hang: called before a hung process is killed.
    """
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
