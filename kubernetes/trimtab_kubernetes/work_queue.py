"""A queue of keys to look at: each at most once in it and once in hand, failed ones later and later."""

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from trimtab_kubernetes.backoff import Backoff

AnyKey = TypeVar("AnyKey", bound=Hashable)
INITIAL_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 60.0


class WorkQueue(Generic[AnyKey]):
    """Hands out keys to any number of workers; never one key to two of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due: dict[AnyKey, float] = {}
        self._heap: list[tuple[float, int, AnyKey]] = []
        self._count = 0
        self._in_hand: set[AnyKey] = set()
        self._again: dict[AnyKey, float] = {}
        self._pauses: dict[AnyKey, Backoff] = {}
        self._changed = asyncio.Event()

    def add(self, key: AnyKey, delay_seconds: float = 0.0) -> None:
        """Ask for a key to be looked at, after a delay at the latest."""
        due = self._clock() + delay_seconds
        if key in self._in_hand:
            self._again[key] = min(due, self._again.get(key, due))
            return
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            self._count += 1
            heapq.heappush(self._heap, (due, self._count, key))
            self._changed.set()

    async def work(self, handle: Callable[[AnyKey], Awaitable[float | None]]) -> None:
        """Handle keys for ever; `handle` returns after how many seconds it wants to be called again, if at all."""
        while True:
            key = await self._take()
            try:
                again_seconds = await handle(key)
            except asyncio.CancelledError:
                self._in_hand.discard(key)
                self.add(key)
                raise
            except Exception as error:  # noqa: BLE001 - `handle` has told of it; here it only means later
                pauses = self._pauses.setdefault(key, Backoff(INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS))
                self._done(key, pauses.next_seconds(error))
            else:
                self._pauses.pop(key, None)
                self._done(key, again_seconds)

    async def _take(self) -> AnyKey:
        while True:
            while self._heap:
                due, _, key = self._heap[0]
                if self._due.get(key) != due:
                    heapq.heappop(self._heap)  # asked for earlier since
                    continue
                if due > self._clock():
                    break
                heapq.heappop(self._heap)
                del self._due[key]
                self._in_hand.add(key)
                return key
            self._changed.clear()
            wait_seconds = self._heap[0][0] - self._clock() if self._heap else None
            try:
                await asyncio.wait_for(self._changed.wait(), wait_seconds)
            except TimeoutError:
                continue

    def _done(self, key: AnyKey, again_seconds: float | None) -> None:
        self._in_hand.discard(key)
        earlier = self._again.pop(key, None)
        if earlier is not None:
            self.add(key, max(earlier - self._clock(), 0.0))
        if again_seconds is not None:
            self.add(key, again_seconds)
