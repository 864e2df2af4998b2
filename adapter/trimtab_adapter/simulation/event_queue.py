"""Event queue: a heap of times and callbacks. Events at equal times keep their order."""

import heapq
from functools import partial
from itertools import count

from trimtab_router.scheduling.interfaces import Callback, PendingArrivals


class EventQueue:
    """A clock that jumps from one event to the next; seconds from the start of the simulation."""

    __slots__ = ("_heap", "_order", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callback]] = []
        self._order = count()

    def call_at(self, time: float, callback: Callback) -> None:
        """Do something then; at once where that moment is past."""
        time = time if time > self.now else self.now  # noqa: FURB136 - a call takes half of what all else does
        heapq.heappush(self._heap, (time, next(self._order), callback))

    def call_when_idle(self, callback: Callback, pending: PendingArrivals) -> None:
        """Do something once all is done that is set for this moment; before that, where nothing is waited for."""
        self.call_at(self.now, partial(self._settle, callback, pending))

    def _settle(self, callback: Callback, pending: PendingArrivals) -> None:
        if pending() is None or not self._heap or self._heap[0][0] > self.now:
            callback()
        else:
            self.call_at(self.now, callback)

    def run(self, until_seconds: float) -> None:
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until_seconds:
            self.now, _, callback = pop(heap)
            callback()
        self.now = until_seconds
