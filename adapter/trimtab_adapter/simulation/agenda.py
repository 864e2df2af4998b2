"""What happens when: a heap of moments and what is to be done then. Equal moments keep the order they were set in."""

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class Agenda:
    """A clock that jumps from one thing to do to the next; seconds from the start of the simulation."""

    __slots__ = ("_heap", "_order", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._order = count()

    def at(self, seconds: float, action: Action) -> None:
        """Do something then; at once where that moment is past."""
        heapq.heappush(self._heap, (max(self.now, seconds), next(self._order), action))

    def run(self, until_seconds: float) -> None:
        """Do all that is due until then, what is set meanwhile included."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until_seconds:
            self.now, _, action = pop(heap)
            action()
        self.now = until_seconds

    @property
    def empty(self) -> bool:
        """Whether nothing is left to do."""
        return not self._heap
