"""Event queue: a heap of times and callbacks. Events at equal times keep their order."""

from collections import deque
from heapq import heappop, heappush
from itertools import count

from trimtab_router.scheduling.interfaces import Callback, PendingArrivals


class EventQueue:
    """A clock that jumps from one event to the next; seconds from the start of the simulation."""

    __slots__ = ("_heap", "_next", "_soon", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callback]] = []
        self._next = count().__next__
        # Set for this moment, at this moment: later than all of the heap that are due.
        self._soon: deque[tuple[Callback, PendingArrivals | None]] = deque()

    def call_at(self, time: float, callback: Callback) -> None:
        """Do something then; at once where that moment is past."""
        if time > self.now:
            heappush(self._heap, (time, self._next(), callback))
        else:
            self._soon.append((callback, None))

    def call_when_idle(self, callback: Callback, pending: PendingArrivals) -> None:
        """Do something once all is done that is set for this moment; before that, where nothing is waited for."""
        self._soon.append((callback, pending))

    def run(self, until_seconds: float) -> None:
        heap, soon = self._heap, self._soon
        while soon or (heap and heap[0][0] <= until_seconds):
            if soon and not (heap and heap[0][0] <= self.now):
                callback, pending = soon.popleft()
                if soon and pending is not None and pending() is not None:
                    soon.append((callback, None))
                    continue
            else:
                self.now, _, callback = heappop(heap)
            callback()
        self.now = until_seconds
