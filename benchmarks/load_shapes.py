"""The shapes of load that forecasters and planners are judged on: excerpts of a recorded load, and drawn ones.

The rules for excerpts are IPA's (section 5.1), on the load divided by five: bursty ranges over more than 30 and ends a
calm stretch, steady stays within a narrow band, fluctuating ranges widely within ten minutes.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

DIVISOR = 5.0
STEP_SECONDS = 60
MOST_EXCERPTS = 6
Load = NDArray[np.float64]


def _is_bursty(d: Load) -> bool:
    return bool(np.ptp(d) > 30 and abs(d[0] - d[-200]) < 5 and abs(d[0] - d[500]) > 30)


def _is_steady_low(d: Load) -> bool:
    return bool(np.ptp(d) < 9 and d.max() < 20)


def _is_steady_high(d: Load) -> bool:
    return bool(np.ptp(d) < 20 and d.min() > 28)


def _is_fluctuating(d: Load) -> bool:
    return bool(np.ptp(d) > 30)


RULES: Mapping[str, tuple[int, Callable[[Load], bool]]] = {
    "bursty": (1200, _is_bursty),
    "steady_low": (1200, _is_steady_low),
    "steady_high": (600, _is_steady_high),
    "fluctuating": (600, _is_fluctuating),
}
"""Seconds of an excerpt, and what its whole requests per second, divided by five, must look like."""


def excerpts(rps: Load, shape: str) -> list[int]:
    """Where excerpts of a shape begin: the first few that touch no gap and each other not, in seconds."""
    length, matches = RULES[shape]
    found: list[int] = []
    start = 0
    while start + length <= rps.size and len(found) < MOST_EXCERPTS:
        cut = rps[start : start + length]
        if not np.isnan(cut).any() and matches(np.floor(cut / DIVISOR)):
            found.append(start)
            start += length
        else:
            start += STEP_SECONDS
    return found


def drawn(seconds: int, level_rps: float, rng: np.random.Generator) -> dict[str, Load]:
    """Draw the plain shapes at one level, each with Poisson arrivals and without any noise."""
    progress = np.arange(seconds) / seconds
    rates = {
        "constant": np.full(seconds, level_rps),
        "ramp": level_rps * (0.3 + 1.7 * progress),
        "wave": level_rps * (1 + 0.6 * np.sin(2 * np.pi * 6 * progress)),
        "steps": level_rps * np.repeat([1.0, 3.0, 0.5, 2.0, 1.0, 4.0], -(-seconds // 6))[:seconds],
    }
    noisy = {f"{name}_poisson": rng.poisson(rate).astype(np.float64) for name, rate in rates.items()}
    return {f"{name}_exact": rate for name, rate in rates.items()} | noisy
