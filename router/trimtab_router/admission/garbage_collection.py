"""Looks for garbage where it weighs: soon after a large request ended.

Who was cut short leaves an exception whose frames hold the body, in a cycle. The collector counts objects, not bytes,
and would come for a few hundred MiB when ten thousand others have been made.
"""

import asyncio
import gc

SOON_SECONDS = 0.1
"""The request's own task ends before; those that end meanwhile are swept together."""


class CollectorPacer:
    """The sweeps of one router; a sweep takes some milliseconds, since what was imported is not looked at."""

    def __init__(self) -> None:
        self._due: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        """Sweep in a moment, once however many ask."""
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(SOON_SECONDS, self._sweep)

    def close(self) -> None:
        """Sweep no more."""
        if self._due is not None:
            self._due.cancel()

    def _sweep(self) -> None:
        self._due = None
        gc.collect()
