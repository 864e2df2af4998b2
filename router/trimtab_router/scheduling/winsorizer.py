"""`Winsorizer`: clips the rarest of the largest amounts, so that the requests of one caller move no estimate.

An amount counts at most as much as the largest one that more than a few of the last 10,000 amounts reached: more than
nine, or one in 200 if that is less. A change that many requests share counts in full from the tenth request on.
"""

from collections import deque
from heapq import heappush, heapreplace, nlargest
from itertools import chain

BLOCKS, BLOCK_AMOUNTS = 10, 1000
MAX_CLIPPED, CLIPPED_SHARE = 9, 0.005


class Winsorizer:
    """Largest recent amounts of one quantity."""

    def __init__(self) -> None:
        self._largest: deque[list[float]] = deque([[]], maxlen=BLOCKS)  # heaps, by block of amounts
        self._amounts = 0  # of the last block
        self.limit = 0.0
        """Largest amount that is not rare."""

    def clip(self, amount: float) -> float:
        """Add an amount; return it, or the largest one that is not rare if that is less."""
        if self._amounts == BLOCK_AMOUNTS:
            self._largest.append([])
            self._amounts = 0
        self._amounts += 1
        largest = self._largest[-1]
        if len(largest) <= MAX_CLIPPED:
            heappush(largest, amount)
        elif amount > largest[0]:
            heapreplace(largest, amount)
        else:  # reached by more than MAX_CLIPPED amounts of this block alone
            return amount
        amounts = (len(self._largest) - 1) * BLOCK_AMOUNTS + self._amounts
        clipped = min(MAX_CLIPPED, int(CLIPPED_SHARE * amounts))
        self.limit = nlargest(clipped + 1, chain.from_iterable(self._largest))[-1]
        return min(amount, self.limit)
