"""Bootstrap confidence interval of a quantile over measurement rounds.

Measurements of one round share the state of the machine, so the bootstrap resamples rounds, not measurements.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2_000
Rounds = Sequence[NDArray[np.float64]]
"""The measurements of each round."""
Sample = NDArray[np.int64]
"""Indexes of resampled rounds."""


def p99(rounds: Rounds, sample: Sample) -> float:
    """Return the 99th percentile of the pooled rounds, or infinity if they are empty."""
    pooled = np.concatenate([rounds[number] for number in sample])
    return float(np.quantile(pooled, 0.99)) if len(pooled) else float("inf")


def confidence_interval(statistic: Callable[[Sample], float], rounds: int) -> tuple[float, float]:
    """Return the bounds of the 90 % bootstrap interval of a statistic of rounds."""
    random = np.random.default_rng(0)
    values = [statistic(random.integers(rounds, size=rounds)) for _ in range(RESAMPLES)]
    low, high = np.quantile(values, (0.05, 0.95))
    return float(low), float(high)
