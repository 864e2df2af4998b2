"""`EventLoopClock`: the asyncio event loop as the clock of the schedulers."""

import asyncio
import time

from trimtab_router.scheduling.interfaces import Callback, PendingArrivals

QUIET_TURNS = 16


class EventLoopClock:
    """Monotonic time, and timers of the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    @property
    def now(self) -> float:
        return time.monotonic()

    def call_at(self, deadline: float, callback: Callback) -> None:
        self._loop.call_later(max(deadline - time.monotonic(), 0.0), callback)

    def call_when_idle(self, callback: Callback, pending_arrivals: PendingArrivals) -> None:
        """Call `callback` once several turns of the event loop bring no new arrival.

        Requests being read thus join the batch. This costs an idle router some ten microseconds. A busy router loses no
        time: it reads the next requests meanwhile.
        """
        self._loop.call_soon(self._settle, callback, pending_arrivals, None, 0)

    def _settle(
        self, callback: Callback, pending_arrivals: PendingArrivals, before: int | None, quiet_turns: int
    ) -> None:
        arrivals = pending_arrivals()
        if arrivals is None or quiet_turns >= QUIET_TURNS:
            callback()
        else:  # arrivals before the first turn belong to the event that scheduled the call
            quiet_turns = quiet_turns + 1 if before in {None, arrivals} else 0
            self._loop.call_soon(self._settle, callback, pending_arrivals, arrivals, quiet_turns)
