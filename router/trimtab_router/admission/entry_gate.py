"""`EntryGate`: admits a few requests per turn of the event loop, so that responses of model servers are not delayed.

The event loop handles everything that is ready in one turn. In overload that can be hundreds of new requests, most of
them rejected, before the next batch is sent or the next response is read. A request that has waited too long is
rejected before any work is spent on it.
"""

import asyncio
import time
from collections import deque

from trimtab_router.refusal import overload

PER_TURN = 8
MAX_WAITING = 4096


class EntryGate:
    """FIFO queue of requests that wait to be admitted. One that waited longer than `max_wait_seconds` is rejected."""

    def __init__(self, max_wait_seconds: float) -> None:
        self._max_wait_seconds = max_wait_seconds
        self._loop = asyncio.get_running_loop()
        self._remaining = PER_TURN
        self._scheduled = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self, arrived_at: float) -> None:
        """Wait until this request may start. Raises Refusal if too many requests wait, or this one waited too long."""
        self._schedule()
        if self._remaining and not self._waiting:
            self._remaining -= 1
            return
        if len(self._waiting) >= MAX_WAITING:
            raise overload(f"{MAX_WAITING} requests wait to be admitted")
        slot = self._loop.create_future()
        self._waiting.append(slot)
        await slot
        waited = time.monotonic() - arrived_at
        if waited > self._max_wait_seconds:
            raise overload(f"the request waited {waited:.3f} s to be admitted")

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._scheduled = False
        self._remaining = PER_TURN
        while self._remaining and self._waiting:
            slot = self._waiting.popleft()
            if not slot.done():
                slot.set_result(None)
                self._remaining -= 1
        if self._waiting:
            self._schedule()
