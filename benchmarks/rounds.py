"""A quantile over rounds together, and how far it may be by chance.

What comes in one round shares what the machine did in it, so rounds are drawn again, not what is in them.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2_000
Rounds = Sequence[NDArray[np.float64]]
"""What was measured, round by round."""
Drawn = NDArray[np.int64]
"""Numbers of rounds."""


def p99(rounds: Rounds, which: Drawn) -> float:
    """The 99th percentile of these rounds together; infinite where there is nothing in them."""
    together = np.concatenate([rounds[number] for number in which])
    return float(np.quantile(together, 0.99)) if len(together) else float("inf")


def by_chance(told: Callable[[Drawn], float], rounds: int) -> tuple[float, float]:
    """Between what bounds 90 % of what is told of rounds lie, had others of so many come."""
    random = np.random.default_rng(0)
    found = [told(random.integers(rounds, size=rounds)) for _ in range(RESAMPLES)]
    low, high = np.quantile(found, (0.05, 0.95))
    return float(low), float(high)
