"""Shell: waits for the end of a process that gives a sign of life now and then, and ends one that hangs."""

import asyncio
from collections.abc import Callable

from trimtab_pipelines.processes.child_process import ChildProcess

LAST_CHANCE_SECONDS = 1.0
"""After silence: where we were stopped ourselves, what was said meanwhile is still to be read."""
KILL_SECONDS = 0.2


async def wait_for_end(module: ChildProcess, silent_seconds: float, on_hang: Callable[[], None]) -> int:
    """Wait for the end of a process whose lines are its signs of life; returns its exit code.

    Args:
        module: the process.
        silent_seconds: how long it may say nothing.
        on_hang: called before one that says nothing is killed.
    """
    patience_seconds = silent_seconds
    while True:
        said = await _heard(module, patience_seconds)
        if said is None and patience_seconds < silent_seconds:
            on_hang()
            await module.stop(KILL_SECONDS)
        if said is None and module.running:
            patience_seconds = min(LAST_CHANCE_SECONDS, 0.5 * silent_seconds)
        elif said:
            patience_seconds = silent_seconds
        else:
            return await module.wait()


async def _heard(module: ChildProcess, patience_seconds: float) -> bytes | None:
    """The next line, empty at the end of all it says; None where none comes in time."""
    try:
        async with asyncio.timeout(patience_seconds):
            return await module.line()
    except TimeoutError:
        return None
