"""Event loop clock: how many turns a dispatch waits for requests that are being read."""

import asyncio

from trimtab_router import factory
from trimtab_router.factory import FEW_QUIET_TURNS, QUIET_TURNS, EventLoopClock


class Turns:
    """A callback of a clock, and the turns of the event loop until it is called."""

    def __init__(self, clock):
        self._clock = clock
        self.arrivals = 0

    async def wait(self, arrival_at=None):
        """Number of looks at the arrivals until the call; one arrives before the look of this number."""
        looks, called = 0, asyncio.Event()
        self._called = called

        def look():
            nonlocal looks
            self.arrivals += looks == arrival_at
            looks += 1
            return self.arrivals

        self._clock.call_when_idle(self.call, look)
        await called.wait()
        return looks

    def call(self):
        self._called.set()


async def test_dispatch_without_company_waits_few_turns_next(monkeypatch):
    monkeypatch.setattr(factory, "JOINING_SECONDS", 0.0)
    turns = Turns(EventLoopClock())
    assert await turns.wait() == QUIET_TURNS + 1
    assert await turns.wait() == FEW_QUIET_TURNS + 1
    assert await turns.wait() == FEW_QUIET_TURNS + 1


async def test_arrival_that_joins_restores_all_turns(monkeypatch):
    monkeypatch.setattr(factory, "JOINING_SECONDS", 0.0)
    turns = Turns(EventLoopClock())
    await turns.wait()
    assert await turns.wait(arrival_at=2) == 2 + QUIET_TURNS + 2
    assert await turns.wait() == QUIET_TURNS + 1


async def test_arrival_right_after_a_call_restores_all_turns(monkeypatch):
    monkeypatch.setattr(factory, "JOINING_SECONDS", 60.0)
    turns = Turns(EventLoopClock())
    await turns.wait()
    assert await turns.wait() == QUIET_TURNS + 1


async def test_full_batch_does_not_wait():
    called = asyncio.Event()
    EventLoopClock().call_when_idle(called.set, lambda: None)
    async with asyncio.timeout(5):
        await called.wait()
