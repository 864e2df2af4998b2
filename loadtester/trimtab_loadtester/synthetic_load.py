"""Synthetic load: plateaus with steps and short bursts, as in the Twitter trace, within bounds.

Plateaus are generated in rounds. A round has the minimum rate, the maximum rate and two rates between, in random order,
so that a few minutes cover the whole range. The seed determines order, lengths and bursts.
"""

import numpy as np
from numpy.typing import NDArray

LEVELS_PER_ROUND = 4
BURST_PROBABILITY = 0.5
BURST_FACTOR = 2.0
BURST_SECONDS = (3, 7)


def generate_rates(
    low_rps: float, high_rps: float, seed: int, seconds: int, plateau_seconds: int = 30
) -> NDArray[np.float64]:
    """Generate requests per second, [seconds], each within low_rps … high_rps.

    Args:
        low_rps: minimum rate; at least 0.
        high_rps: maximum rate; at least `low_rps`.
        seed: the same arguments give the same rates, and a longer load begins with the shorter one.
        seconds: length of the load.
        plateau_seconds: mean length of a plateau; each lasts 0.7 to 1.3 times this.
    """
    random = np.random.default_rng(seed)
    levels = np.geomspace(max(low_rps, 1e-3 * high_rps, 1e-9), max(high_rps, 1e-9), LEVELS_PER_ROUND)
    plateaus: list[NDArray[np.float64]] = []
    length = 0
    while length < seconds:
        for level in random.permutation(levels):
            plateaus.append(_plateau(float(level), plateau_seconds, random))
            length += plateaus[-1].size
    rates: NDArray[np.float64] = np.concatenate([np.empty(0), *plateaus])[:seconds].clip(low_rps, high_rps)
    return rates


def _plateau(level_rps: float, mean_seconds: int, random: np.random.Generator) -> NDArray[np.float64]:
    rates = np.full(max(1, round(mean_seconds * random.uniform(0.7, 1.3))), level_rps)
    burst = random.random() < BURST_PROBABILITY
    start, length = int(random.integers(rates.size)), int(random.integers(*BURST_SECONDS))
    if burst:
        rates[start : start + length] *= BURST_FACTOR
    return rates
