"""How many callers the door refuses before it reads what they ask. Pure.

To refuse a request for want of room, the door reads it. In a flood that alone fills its thread, and those who could be
answered wait in sockets too. So most of a flood is refused unread, which costs half as much. As many are read as fill
the room. Over HTTP/1.1 nothing is gained: who is refused before his body was read has to connect again.
"""

from dataclasses import dataclass

READ_REFUSALS_RPS = 500.0
"""Refusals a second for want of room that cost little: with fewer nobody is refused unread, and so many remain."""
MOST = 0.98
"""The share that is refused unread at most: the others tell when the flood is over."""
STEPS = 100


@dataclass(frozen=True, slots=True)
class Counted:
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


def share(since: Counted, counted: Counted) -> float:
    """The share (0 to `MOST`) of all requests to refuse unread, from what went by in between.

    Args:
        since: the count before.
        counted: the count now.
    """
    seconds = counted.now - since.now
    if seconds <= 0:
        return 0.0
    answered_rps = (counted.answered - since.answered) / seconds
    refused_rps = (counted.refused - since.refused) / seconds
    came_rps = (counted.came - since.came) / seconds
    read_rps = answered_rps + READ_REFUSALS_RPS
    if refused_rps <= READ_REFUSALS_RPS or came_rps <= read_rps:
        return 0.0
    return min(round((1.0 - read_rps / came_rps) * STEPS) / STEPS, MOST)
