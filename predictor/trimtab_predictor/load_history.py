"""`LoadHistory`: merges histories of minutes into hours of load, in which recurring changes are visible."""

import math

import numpy as np
from numpy.typing import NDArray

from trimtab_predictor.context import MEMORY_SECONDS


class LoadHistory:
    """The newest six hours of one load, merged from histories that overlap or have gaps."""

    def __init__(self) -> None:
        self._rps: NDArray[np.float64] = np.empty(0)
        self._end_second = 0

    def extend(self, history_rps: NDArray[np.float64], now_seconds: float) -> NDArray[np.float64]:
        """Add a history [S] that ends at `now_seconds`, and return all known load, newest last.

        The newer value of a second counts. A gap between two histories is NaN. After a clock that went back, or a gap
        longer than the memory, only the new history is known.
        """
        end_second = math.floor(now_seconds)
        passed = end_second - self._end_second
        older = self._rps if 0 <= passed < MEMORY_SECONDS else self._rps[:0]
        if older.size:
            overlap = min(max(history_rps.size - passed, 0), older.size)
            gap = np.full(max(passed - history_rps.size, 0), np.nan)
            older = np.concatenate([older[: older.size - overlap], gap])
        self._rps = np.concatenate([older, history_rps])[-MEMORY_SECONDS:]
        self._end_second = end_second
        return self._rps
