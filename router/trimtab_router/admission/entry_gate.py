"""Lets requests in a few at a time, so that answers of model servers never queue behind a crowd at the door.

The event loop serves whatever is ready in one turn. In overload that would be hundreds of new requests, most of them
only to be refused, before the next batch is sent or the next answer handed on. Here each turn lets a few in; who has
waited too long by then is refused before anything was spent on it.
"""

import asyncio
import time
from collections import deque

from trimtab_router.refusal import overload

PER_TURN = 8
MAX_WAITING = 4096


class EntryGate:
    """Where requests wait for their turn of the event loop, first come, first served.

    Args:
        patience_seconds: who waited longer is refused.
    """

    def __init__(self, patience_seconds: float) -> None:
        self._patience_seconds = patience_seconds
        self._loop = asyncio.get_running_loop()
        self._left = PER_TURN
        self._turning = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self, arrived_at: float) -> None:
        """Wait for a turn; `arrived_at` in monotonic seconds. Raises Refusal in overload."""
        self._keep_turning()
        if self._left and not self._waiting:
            self._left -= 1
            return
        if len(self._waiting) >= MAX_WAITING:
            raise overload(f"{MAX_WAITING} requests wait to be let in")
        turn = self._loop.create_future()
        self._waiting.append(turn)
        await turn
        waited = time.monotonic() - arrived_at
        if waited > self._patience_seconds:
            raise overload(f"the request waited {waited:.3f} s to be let in")

    def _keep_turning(self) -> None:
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turning = False
        self._left = PER_TURN
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._left -= 1
        if self._waiting:
            self._keep_turning()
