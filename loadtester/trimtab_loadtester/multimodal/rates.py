"""Synthetic rates of multimodal requests over time, with the statistics of a recorded trace."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trimtab_loadtester.multimodal.traffic import BURST_SHARE, IMAGE_SHARE, Floats, Traffic

MINUTES_AN_HOUR: Final = 60
BURST_HOURS: Final = (2.0, 10.0)
"""Minimum and maximum length of a burst in the trace."""
_TEXT_SPREAD, _IMAGE_SPREAD = 0.32, 0.45
"""Standard deviation of the logarithm of a rate between hours, fitted to the trace."""
_MINUTE_SPREAD: Final = 0.37
"""Standard deviation between minutes of each process; their sum then varies between consecutive minutes as the trace
does, 11 times as much as a Poisson process."""
_MINUTE_CORRELATION: Final = 0.74 ** (1 / MINUTES_AN_HOUR)
"""Autocorrelation of the hourly deviation between consecutive minutes; between consecutive hours it is 0.74."""
_TEXT, _IMAGES, _BURSTS = 1, 2, 3


def synthetic_rates(minutes: int, seed: int) -> Traffic:
    """Draw rates with mean 1 request a second, the variance of the trace, and bursts of images that last for hours."""
    text = (1 - IMAGE_SHARE) * _log_normal_rates(minutes, _TEXT_SPREAD, (seed, _TEXT))
    image = IMAGE_SHARE * _log_normal_rates(minutes, _IMAGE_SPREAD, (seed, _IMAGES))
    return Traffic(text, image, _bursts(minutes, (seed, _BURSTS)))


def _log_normal_rates(minutes: int, spread: float, seed: Sequence[int]) -> Floats:
    """Draw log-normal rates with mean 1: an AR(1) process over hours, and independent noise by minute."""
    random = np.random.default_rng(seed)
    steps = random.normal(0, spread * (1 - _MINUTE_CORRELATION**2) ** 0.5, minutes)
    slow, at = np.empty(minutes), float(random.normal(0, spread))
    for minute in range(minutes):
        slow[minute] = at = _MINUTE_CORRELATION * at + float(steps[minute])
    variance = spread**2 + _MINUTE_SPREAD**2
    return np.asarray(np.exp(slow + random.normal(0, _MINUTE_SPREAD, minutes) - variance / 2), dtype=np.float64)


def _bursts(minutes: int, seed: Sequence[int]) -> NDArray[np.bool_]:
    random = np.random.default_rng(seed)
    bursts, on = np.zeros(minutes, dtype=bool), bool(random.random() < BURST_SHARE)
    start = 0
    while start < minutes:
        hours = float(random.uniform(*BURST_HOURS)) * (1 if on else (1 - BURST_SHARE) / BURST_SHARE)
        end = start + max(1, round(MINUTES_AN_HOUR * hours))
        bursts[start:end] = on
        start, on = end, not on
    return bursts
