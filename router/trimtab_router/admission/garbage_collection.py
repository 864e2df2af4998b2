"""`CollectorPacer`: runs Python's garbage collector soon after a large request ends.

An aborted request leaves an exception whose frames hold its body in a reference cycle. The collector counts objects,
not bytes, and would otherwise free hundreds of MiB only after thousands of other objects have been created.
"""

import asyncio
import gc

SOON_SECONDS = 0.1
"""Delay of a collection: the request's task ends first, and requests that end meanwhile are covered too."""


class CollectorPacer:
    """Garbage collections of one router. A collection takes some milliseconds, because imported objects are frozen."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(SOON_SECONDS, self._collect)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _collect(self) -> None:
        self._timer = None
        gc.collect()
