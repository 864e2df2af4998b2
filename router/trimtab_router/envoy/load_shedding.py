"""How many callers the door refuses before it reads what they ask. Pure.

To refuse a request for want of room, the door reads it. In a flood that alone fills its thread, and those who could be
answered wait in sockets too. So most of a flood is refused unread, which costs half as much. As many are read as fill
the room. Over HTTP/1.1 nothing is gained: who is refused before his body was read has to connect again.
"""

from collections import deque
from dataclasses import dataclass

READ_REFUSALS_RPS = 500.0
"""Refusals a second for want of room that cost little: with fewer nobody is refused unread, and so many remain."""
MOST = 0.98
"""The share that is refused unread at most: the others tell when the flood is over."""
STEPS = 100
REMEMBERED_SECONDS = 1.0
"""The fastest that was answered within it says how many to read: answers come in batches, and while few come, because
the door is behind with its flood, too few read would keep it so."""


@dataclass(frozen=True, slots=True)
class ProxyCounters:
    """What went by until the moment `now` (monotonic seconds).

    Args:
        answered: requests that the router answered.
        refused: requests that the door refused for want of room, read or unread.
        came: requests that came to the door over HTTP/2, whatever became of them.
    """

    now: float
    answered: int
    refused: int
    came: int


class LoadShedder:
    """Follows a flood from one count to the next.

    Args:
        first: the count to begin with.
    """

    def __init__(self, first: ProxyCounters) -> None:
        self._last = first
        self._answered: deque[tuple[float, float]] = deque()
        """When so many a second were answered."""

    def share(self, counted: ProxyCounters) -> float:
        """The share (0 to `MOST`) of all requests to refuse unread from now on."""
        since, self._last = self._last, counted
        seconds = counted.now - since.now
        if seconds <= 0:
            return 0.0
        refused_rps = (counted.refused - since.refused) / seconds
        came_rps = (counted.came - since.came) / seconds
        read_rps = self._fastest_rps(counted.now, (counted.answered - since.answered) / seconds) + READ_REFUSALS_RPS
        if refused_rps <= READ_REFUSALS_RPS or came_rps <= read_rps:
            return 0.0
        return min(round((1.0 - read_rps / came_rps) * STEPS) / STEPS, MOST)

    def _fastest_rps(self, now: float, answered_rps: float) -> float:
        self._answered.append((now, answered_rps))
        while self._answered[0][0] <= now - REMEMBERED_SECONDS:
            self._answered.popleft()
        return max(rps for _, rps in self._answered)
