"""Longest stall of a test's event loop, most likely caused by the machine."""

import asyncio
import time
from types import TracebackType
from typing import Self

_TICK_SECONDS = 0.01


class Pauses:
    """Watches the loop within its block."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self._ticking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._ticking is not None
        self._ticking.cancel()
        await asyncio.gather(self._ticking, return_exceptions=True)

    async def _tick(self) -> None:
        while True:
            begun = time.monotonic()
            await asyncio.sleep(_TICK_SECONDS)
            self.longest_seconds = max(self.longest_seconds, time.monotonic() - begun)
