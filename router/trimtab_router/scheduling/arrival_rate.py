"""`ArrivalRate`: rows per second over a short sliding window."""

WINDOW_SECONDS = 0.5


class ArrivalRate:
    """Rows per second. Of the previous window, the share that still lies inside the sliding one counts.

    Args:
        now: seconds.
    """

    def __init__(self, now: float) -> None:
        self._window_start = self._first = now
        self._rows = self._before = 0

    def note(self, rows: int, now: float) -> None:
        self._roll(now)
        self._rows += rows

    def rps(self, now: float) -> float:
        """Return the rate. At the beginning it is taken over at least half a window."""
        self._roll(now)
        since = now - self._window_start
        kept = self._before * (1.0 - since / WINDOW_SECONDS)
        return (self._rows + kept) / min(max(now - self._first, WINDOW_SECONDS / 2), WINDOW_SECONDS)

    def _roll(self, now: float) -> None:
        passed = int((now - self._window_start) / WINDOW_SECONDS)
        if passed <= 0:
            return
        self._before, self._rows = self._rows if passed == 1 else 0, 0
        self._window_start += passed * WINDOW_SECONDS
