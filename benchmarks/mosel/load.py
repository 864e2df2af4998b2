"""The paper's load (section 7.1): queries a second of a Twitter trace, sent as jobs of random sizes and floors."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trimtab_predictor.trace import read_trace

TRACE = "twitter_rps_train.csv.gz"
START_SECONDS = 869_160
"""Of the trace, where a bursty stretch begins."""
LEAST_RPS = 5.0
SIZE_MEAN, SIZE_DEVIATION = 1.0, 6.0


@dataclass(frozen=True, slots=True, eq=False)
class Jobs:
    """Jobs of one run: when each comes, its rows, and its floor as a share of the model's range of accuracies."""

    at_seconds: NDArray[np.float64]
    rows: NDArray[np.int64]
    floor_share: NDArray[np.float64]

    def floors(self, low: float, high: float) -> NDArray[np.float64]:
        """The accuracies that they ask of a model whose subsets have from `low` to `high`, [N]."""
        return low + self.floor_share * (high - low)


def shape(trace: Path | None, start_seconds: int, seconds: int) -> NDArray[np.float64]:
    """How the load goes, 0 … 1, one value a second; without a trace plateaus with steps and bursts, as Twitter has."""
    if trace is None:
        rng = np.random.default_rng(0)
        plateaus = np.repeat(rng.uniform(0.1, 1.0, seconds // 20 + 1), 20)[:seconds]
        counts = rng.poisson(60 * plateaus).astype(np.float64)
    else:
        counts = np.nan_to_num(read_trace(trace).excerpt(start_seconds, start_seconds + seconds).rps)
    low, high = counts.min(), counts.max()
    shares: NDArray[np.float64] = (counts - low) / max(high - low, 1.0)
    return shares


def jobs(load: NDArray[np.float64], most_rps: float, seed: int) -> Jobs:
    """Jobs that make up the queries of each second, from the least load to the most."""
    rng = np.random.default_rng(seed)
    at: list[float] = []
    rows: list[int] = []
    for second, share in enumerate(load):
        left = round(LEAST_RPS + share * max(most_rps - LEAST_RPS, 0.0))
        while left > 0:
            size = min(max(round(abs(rng.normal(SIZE_MEAN, SIZE_DEVIATION))), 1), left)
            at.append(second + rng.random())
            rows.append(size)
            left -= size
    order = np.argsort(at)
    return Jobs(np.array(at)[order], np.array(rows)[order], rng.random(len(at)))
