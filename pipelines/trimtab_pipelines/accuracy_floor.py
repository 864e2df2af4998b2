"""What mean accuracy a job needs, so that a floor holds in expectation or with a probability. Pure.

The right answers of a job are taken to be independent of one another, each right with the accuracy of how it was
answered. The least mean for a probability stands on the binomial. Where rows are answered in several ways, the same
mean is at least as sure, as long as it lies above the floor by a row (Hoeffding 1956, theorem 5): one number will do.
"""

from functools import lru_cache
from math import ceil

import numpy as np
from numpy.typing import NDArray

_BISECTIONS = 40


def required_mean(floor: float, rows: int, probability: float | None = None) -> float:
    """The least mean accuracy of its rows at which a job keeps its floor.

    Args:
        floor: the share of right answers wished for, 0…1.
        rows: of the job.
        probability: with which at least so many are to be right, above 0 and below 1; None: on average.
    """
    if probability is None:
        return floor
    if not 0.0 < probability < 1.0:
        raise ValueError(f"a probability of {probability:g} is outside 0…1: leave it out to mean an average")
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
    """Probability that so many of the rows are right, each with this mean (above 0 and below 1)."""
    counts = np.arange(right, rows + 1)
    return float(np.exp(_log_binomials(right, rows) + counts * np.log(mean) + (rows - counts) * np.log1p(-mean)).sum())


@lru_cache(maxsize=4)  # a bisection asks for the same ones; callers choose their length, so few are kept
def _log_binomials(right: int, rows: int) -> NDArray[np.float64]:
    """Logarithms of the ways to choose `right`, `right` + 1, … `rows` rows."""
    log_factorials = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, rows + 1)))))
    return np.asarray(log_factorials[rows] - log_factorials[right:] - log_factorials[: rows - right + 1][::-1])
