"""Keeps the window: counts what it is made of, looks several times a second, and says who may come in.

It looks only while requests are under way, so that an idle router sleeps.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from trimtab_router.admission.concurrency_limit import FULL_SHARE, ConcurrencyLimit, LimitBounds, LoadSample
from trimtab_router.admission.memory_budget import MemoryBudget
from trimtab_router.refusal import overload

LOOK_SECONDS = 0.1


class ConcurrencyController:
    """The window of one router.

    Args:
        window: the limit, observed from here.
        budget: counts the requests under way.
        bounds: what the plan and its replicas carry now; None while that says nothing.
    """

    def __init__(
        self, window: ConcurrencyLimit, budget: MemoryBudget, bounds: Callable[[], LimitBounds | None]
    ) -> None:
        self.window = window
        self._budget = budget
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self.answered = 0
        """Requests answered since the start."""
        self._refused = 0
        self._due = 0.0
        self._look: asyncio.TimerHandle | None = None
        self._crowded = asyncio.Event()

    def check(self) -> None:
        """Raise Refusal where the window is full."""
        self._keep_looking()
        if self._budget.waiting >= self.window.limit:
            self.note_overload()
            raise overload(f"{self._budget.waiting} requests are under way, as many as can be answered in time")

    def note_answer(self) -> None:
        """A request was answered."""
        self.answered += 1

    def note_overload(self, requests: int = 1) -> None:
        """Requests were turned away, here or at the door, because there are too many."""
        self._refused += requests

    async def crowded(self, most_seconds: float) -> None:
        """Wait until the window is about to be full, but no longer than so."""
        self._crowded.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._crowded.wait(), most_seconds)

    def close(self) -> None:
        """Look no more."""
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def _keep_looking(self) -> None:
        if self._look is None:
            self._due = time.monotonic() + LOOK_SECONDS
            self._look = self._loop.call_later(LOOK_SECONDS, self._looked)

    def _looked(self) -> None:
        self._look = None
        now, under_way = time.monotonic(), self._budget.waiting
        late_seconds = max(now - self._due, 0.0)
        self.window.observe(LoadSample(now, self.answered, self._refused, under_way, late_seconds), self._bounds())
        if under_way >= FULL_SHARE * self.window.limit:
            self._crowded.set()
        if under_way:
            self._keep_looking()
        else:
            self.window.forget()
