"""Downsampled history: rebuilds seconds from bins of ten with a peak and a mean, as a metrics server stores a load.

A forecaster uses single seconds, and their variation determines its confidence. The seconds of a bin therefore vary
around its mean as Poisson arrivals do, as far as peak and mean allow, in a fixed order: the same bins give the same
seconds.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

BIN_SECONDS = 10
_ROOTS = np.array([-1.3, -0.9, -0.6, -0.3, 0.0, 0.2, 0.5, 0.9, 1.5])
"""Where nine of ten Poisson seconds lie around the mean of the nine, in roots of it; the tenth is the peak."""
_ORDERS = ((4, 0, 7, 2, 9, 5, 1, 8, 3, 6), (2, 6, 0, 8, 4, 1, 9, 3, 7, 5), (7, 3, 5, 1, 8, 0, 6, 9, 2, 4))
"""Order of the ten seconds (9 is the peak); it differs between three bins, so that no position stands out."""


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
