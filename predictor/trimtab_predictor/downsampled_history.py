"""Rebuilds seconds from bins of ten: a peak and a mean each, which is what a metrics server keeps of a load.

A forecaster looks at single seconds, and how much they vary tells it how sure it may be. So the seconds of a bin vary
around its mean as arrivals do (by the root of their number) as far as peak and mean allow, in an order that is always
the same: the same bins give the same seconds.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

BIN_SECONDS = 10
_ROOTS = np.array([-1.3, -0.9, -0.6, -0.3, 0.0, 0.2, 0.5, 0.9, 1.5])
"""Where nine of ten Poisson seconds lie around the mean of the nine, in roots of it, the tenth being the peak."""
_ORDERS = ((4, 0, 7, 2, 9, 5, 1, 8, 3, 6), (2, 6, 0, 8, 4, 1, 9, 3, 7, 5), (7, 3, 5, 1, 8, 0, 6, 9, 2, 4))
"""Which of the ten (9 is the peak) comes when; a different order in each of three bins, so that none stands out."""


def seconds_of_bins(bins: Iterable[tuple[float, float]]) -> NDArray[np.float64]:
    """[10 × bins] seconds that have each bin's (peak, mean), in requests per second; mean at most peak.

    A bin whose peak is not known (NaN) gives ten unknown seconds; one whose mean is not, a flat peak.
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
