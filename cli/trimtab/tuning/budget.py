"""How long trials may take."""

import time
from collections.abc import Callable


class TimeBudget:
    """Seconds that trials may take, from now on."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self.clock, self._began = seconds, clock, clock()

    def over(self, share: float = 1.0) -> bool:
        """Whether such a share of it is spent."""
        return self.left(share) <= 0

    def left(self, share: float = 1.0) -> float:
        """Seconds until such a share of it is spent; below 0 once it is."""
        return share * self.seconds - (self.clock() - self._began)
