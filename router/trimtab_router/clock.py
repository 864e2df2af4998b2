"""Shell: the event loop as the clock of the desks."""

import asyncio
import time

from trimtab_router.scheduling.interfaces import Act, Stir

QUIET_TURNS = 16


class EventLoopClock:
    """Monotonic time, and the timers of the running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    @property
    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def at(self, moment: float, act: Act) -> None:
        """Do something then."""
        self._loop.call_later(max(moment - time.monotonic(), 0.0), act)

    def soon(self, act: Act, stir: Stir) -> None:
        """Let requests that are being read right now join: wait until a few turns of the loop bring no more.

        It costs an idle router some ten microseconds, and a busy one nothing: what it would read next is read now.
        """
        self._loop.call_soon(self._settle, act, stir, None, 0)

    def _settle(self, act: Act, stir: Stir, before: int | None, quiet_turns: int) -> None:
        arrivals = stir()
        if arrivals is None or quiet_turns >= QUIET_TURNS:
            act()
        else:  # what came before the first turn came in the moment that woke whoever acts
            quiet_turns = quiet_turns + 1 if before in {None, arrivals} else 0
            self._loop.call_soon(self._settle, act, stir, arrivals, quiet_turns)
