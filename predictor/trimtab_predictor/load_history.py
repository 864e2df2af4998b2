"""Load histories: hours merged from overlapping minutes, and seconds rebuilt from the bins of a metrics server.

Recurring changes of a load are visible in hours. A metrics server stores bins of ten seconds with a peak and a mean. A
forecaster uses single seconds, and their variation determines its confidence. The seconds of a bin therefore vary
around its mean as Poisson arrivals do, as far as peak and mean allow, in a fixed order: the same bins give the same
seconds.
"""

import math
from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trimtab_predictor.context import MEMORY_SECONDS

BIN_SECONDS = 10
_ROOTS = np.array([-1.3, -0.9, -0.6, -0.3, 0.0, 0.2, 0.5, 0.9, 1.5])
"""Where nine of ten Poisson seconds lie around the mean of the nine, in roots of it; the tenth is the peak."""
_ORDERS = ((4, 0, 7, 2, 9, 5, 1, 8, 3, 6), (2, 6, 0, 8, 4, 1, 9, 3, 7, 5), (7, 3, 5, 1, 8, 0, 6, 9, 2, 4))
"""Order of the ten seconds (9 is the peak); it differs between three bins, so that no position stands out."""


Fault = Literal["Missing", "Stale", "Absurd"]


class ObservationError(Exception):
    """Metrics that are missing, stale or out of range; the message names the value found."""

    def __init__(self, message: str, fault: Fault = "Absurd") -> None:
        super().__init__(message)
        self.fault: Fault = fault


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


def seconds_of_bins(bins: Iterable[tuple[float, float]]) -> NDArray[np.float64]:
    """[10 × bins] seconds with each bin's (peak, mean), in requests per second; mean at most peak.

    A bin without a peak (NaN) gives ten unknown seconds; one without a mean gives a flat peak.
    """
    rebuilt = [_seconds(peak, min(mean, peak))[list(_ORDERS[n % 3])] for n, (peak, mean) in enumerate(bins)]
    return np.concatenate(rebuilt) if rebuilt else np.empty(0)


def _seconds(peak: float, mean: float) -> NDArray[np.float64]:
    """Nine seconds around their mean, none above the peak or below zero, then the peak."""
    if np.isnan(peak) or np.isnan(mean):
        return np.full(BIN_SECONDS, peak)
    level = max(0.0, (mean * BIN_SECONDS - peak) / (BIN_SECONDS - 1))
    spread = (_ROOTS - _ROOTS.mean()) * level**0.5
    above, below = float(spread.max()), float(-spread.min())
    scale = min(1.0, (peak - level) / above, level / below) if level > 0 else 0.0
    return np.append(np.clip(level + scale * spread, 0.0, peak), peak)
