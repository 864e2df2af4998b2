"""Accuracy floor of a job: the mean accuracy that its rows need, on average or with a probability.

The correct rows of a job are taken to be independent, each with the accuracy of its operating point. The required mean
for a probability follows from the binomial distribution. If rows use several operating points, the same mean gives at
least that probability while it exceeds the floor by one row (Hoeffding 1956, theorem 5).
"""

from functools import lru_cache
from math import ceil

import numpy as np
from numpy.typing import NDArray

_BISECTIONS = 40


def required_mean(floor: float, rows: int, probability: float | None = None) -> float:
    """Smallest mean accuracy of its rows with which a job keeps its floor, the share of correct rows.

    The floor is kept with this probability, above 0 and below 1; None keeps it on average.
    """
    if probability is None:
        return floor
    if not 0.0 < probability < 1.0:
        raise ValueError(
            f"a probability of {probability:g} must be above 0 and below 1; omit it to require the floor on average"
        )
    return _with_probability(ceil(floor * rows - 1e-9), rows, probability)


@lru_cache(maxsize=4096)
def _with_probability(right: int, rows: int, probability: float) -> float:
    if right <= 0:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if binomial_tail(right, rows, middle) >= probability else (middle, high)
    return high


def binomial_tail(right: int, rows: int, mean: float) -> float:
    """Probability that at least `right` rows are correct, each with this mean (above 0 and below 1)."""
    counts = np.arange(right, rows + 1)
    return float(np.exp(_log_binomials(right, rows) + counts * np.log(mean) + (rows - counts) * np.log1p(-mean)).sum())


@lru_cache(maxsize=4)  # a bisection repeats one key; small, since clients choose its size
def _log_binomials(right: int, rows: int) -> NDArray[np.float64]:
    """Logarithms of the binomial coefficients of `right`, `right` + 1, … `rows`."""
    log_factorials = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, rows + 1)))))
    return np.asarray(log_factorials[rows] - log_factorials[right:] - log_factorials[: rows - right + 1][::-1])
