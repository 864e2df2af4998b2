"""`ConcurrencyController`: samples the load several times a second and applies the concurrency limit.

It samples only while requests are in flight, so that an idle router does not wake up.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from trimtab_router.admission.concurrency_limit import FULL_SHARE, ConcurrencyLimit, LimitBounds, LoadSample
from trimtab_router.admission.memory_budget import MemoryBudget
from trimtab_router.refusal import overload

SAMPLE_SECONDS = 0.1


class ConcurrencyController:
    """Concurrency limit of one router. `bounds` returns None while the bounds of plan and replicas are unknown."""

    def __init__(
        self, concurrency_limit: ConcurrencyLimit, memory: MemoryBudget, bounds: Callable[[], LimitBounds | None]
    ) -> None:
        self.concurrency_limit = concurrency_limit
        self._memory = memory
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self.responses = 0
        """Requests answered since the start."""
        self._rejections = 0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._nearly_full = asyncio.Event()

    def check_capacity(self) -> None:
        self._schedule_sample()
        if self._memory.active_requests >= self.concurrency_limit.limit:
            self.note_overload()
            raise overload(f"{self._memory.active_requests} requests are in flight, as many as can be served in time")

    def note_response(self) -> None:
        self.responses += 1

    def note_overload(self, requests: int = 1) -> None:
        """Count requests rejected, by the router or by Envoy, because too many are in flight."""
        self._rejections += requests

    async def wait_until_nearly_full(self, max_seconds: float) -> None:
        self._nearly_full.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._nearly_full.wait(), max_seconds)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule_sample(self) -> None:
        if self._timer is None:
            self._due = time.monotonic() + SAMPLE_SECONDS
            self._timer = self._loop.call_later(SAMPLE_SECONDS, self._take_sample)

    def _take_sample(self) -> None:
        self._timer = None
        now, in_flight = time.monotonic(), self._memory.active_requests
        late_seconds = max(now - self._due, 0.0)
        self.concurrency_limit.observe(
            LoadSample(now, self.responses, self._rejections, in_flight, late_seconds), self._bounds()
        )
        if in_flight >= FULL_SHARE * self.concurrency_limit.limit:
            self._nearly_full.set()
        if in_flight:
            self._schedule_sample()
        else:
            self.concurrency_limit.reset()
