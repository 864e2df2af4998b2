"""`WorkQueue`: a deduplicating queue of keys with delays and backoff."""

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from trimtab_kubernetes.errors import Backoff

AnyKey = TypeVar("AnyKey", bound=Hashable)
INITIAL_BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 60.0


class WorkQueue(Generic[AnyKey]):
    """Hands out keys to workers; a key is never handled by two workers at once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due: dict[AnyKey, float] = {}
        self._heap: list[tuple[float, int, AnyKey]] = []
        self._count = 0
        self._active: set[AnyKey] = set()
        self._again: dict[AnyKey, float] = {}
        self._backoffs: dict[AnyKey, Backoff] = {}
        self._changed = asyncio.Event()

    def add(self, key: AnyKey, delay_seconds: float = 0.0) -> None:
        """Enqueue a key, to be handled after a delay at the latest."""
        due = self._clock() + delay_seconds
        if key in self._active:
            self._again[key] = min(due, self._again.get(key, due))
            return
        if due < self._due.get(key, float("inf")):
            self._due[key] = due
            self._count += 1
            heapq.heappush(self._heap, (due, self._count, key))
            self._changed.set()

    async def work(self, handle: Callable[[AnyKey], Awaitable[float | None]]) -> None:
        """Handle keys without end; `handle` returns the seconds after which the key is handled again, if at all."""
        while True:
            key = await self._take()
            try:
                requeue_after_seconds = await handle(key)
            except asyncio.CancelledError:
                self._active.discard(key)
                self.add(key)
                raise
            except Exception as error:  # noqa: BLE001 - logged by `handle`; retried with backoff
                backoff = self._backoffs.setdefault(key, Backoff(INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS))
                self._done(key, backoff.next_seconds(error))
            else:
                self._backoffs.pop(key, None)
                self._done(key, requeue_after_seconds)

    async def _take(self) -> AnyKey:
        while True:
            while self._heap:
                due, _, key = self._heap[0]
                if self._due.get(key) != due:
                    heapq.heappop(self._heap)  # superseded by an earlier time
                    continue
                if due > self._clock():
                    break
                heapq.heappop(self._heap)
                del self._due[key]
                self._active.add(key)
                return key
            self._changed.clear()
            wait_seconds = self._heap[0][0] - self._clock() if self._heap else None
            try:
                async with asyncio.timeout(wait_seconds):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _done(self, key: AnyKey, requeue_after_seconds: float | None) -> None:
        self._active.discard(key)
        earlier = self._again.pop(key, None)
        if earlier is not None:
            self.add(key, max(earlier - self._clock(), 0.0))
        if requeue_after_seconds is not None:
            self.add(key, requeue_after_seconds)
