"""Arrival times: an inhomogeneous Poisson process whose rate changes every second or other interval.

Cumulative unit exponential gaps are mapped back to time by the cumulative intensity Λ(t) = ∫ rate (time rescaling).
Counts of disjoint intervals are therefore independent, with variance equal to mean, also if the rate changes. (IPA's
tester draws each offset within a second separately, which bunches requests at the start of every second.)
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]
MAX_ARRIVALS = 20_000_000


def poisson_arrivals(
    rates_rps: Seconds,
    seed: int | Sequence[int],
    duration_seconds: float | None = None,
    *,
    interval_seconds: float = 1.0,
) -> Seconds:
    """Draw the arrival times, in seconds from the start and ascending, of an inhomogeneous Poisson process.

    `rates_rps`, [S], has the requests per second of each interval of `interval_seconds`; the process ends with them, or
    after `duration_seconds` if that is earlier. The same seed and rates give the same arrivals. Raises ValueError if a
    rate is negative or not finite, or there are more than `MAX_ARRIVALS` arrivals.
    """
    wrong = np.flatnonzero(~(np.isfinite(rates_rps) & (rates_rps >= 0)))
    if wrong.size:
        second = int(wrong[0])
        at = f"second {second * interval_seconds:g}"
        raise ValueError(f"rate of {at} is {rates_rps[second]}; rates must be finite and at least 0")
    seconds = np.arange(rates_rps.size + 1, dtype=np.float64) * interval_seconds
    cumulative = np.concatenate([[0.0], np.cumsum(rates_rps)]) * interval_seconds
    end = seconds[-1] if duration_seconds is None else min(duration_seconds, seconds[-1])
    expected = float(np.interp(end, seconds, cumulative))
    if expected > MAX_ARRIVALS:
        raise ValueError(f"the load amounts to {expected:.0f} requests; at most {MAX_ARRIVALS} fit one run")
    times: Seconds = np.interp(_unit_arrivals(expected, np.random.default_rng(seed)), cumulative, seconds)
    return times


def _unit_arrivals(end: float, random: np.random.Generator) -> Seconds:
    """Arrivals of a Poisson process of rate 1 on [0, end)."""
    arrivals = np.cumsum(random.exponential(size=int(end + 6 * end**0.5) + 16))
    while arrivals[-1] < end:
        arrivals = np.concatenate([arrivals, arrivals[-1] + np.cumsum(random.exponential(size=1024))])
    return arrivals[: int(np.searchsorted(arrivals, end))]
