"""Clock that tests advance."""

import heapq
from functools import partial
from itertools import count

from trimtab_router.factory import QUIET_TURNS


class FakeClock:
    """A loop's clock without a loop: timers in order, and the quiet turns that let what arrives at once join."""

    def __init__(self):
        self.now = 0.0
        self._due = []
        self._order = count()

    def call_at(self, moment, act):
        heapq.heappush(self._due, (max(moment, self.now), next(self._order), act))

    def call_when_idle(self, act, stir):
        self.call_at(self.now, partial(self._settle, act, stir, None, 0))

    def _settle(self, act, stir, before, quiet_turns):
        arrivals = stir()
        if arrivals is None or quiet_turns >= QUIET_TURNS:
            act()
        else:
            quiet_turns = quiet_turns + 1 if before in {None, arrivals} else 0
            self.call_at(self.now, partial(self._settle, act, stir, arrivals, quiet_turns))

    def step(self):
        """Do what is due next."""
        self.now, _, act = heapq.heappop(self._due)
        act()

    def run(self, until):
        """Do all that is due until then."""
        while self._due and self._due[0][0] <= until:
            self.step()
        self.now = until
