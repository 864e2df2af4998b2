"""The paper's loads: Poisson arrivals at 200 to 700 a second, and a bursty trace."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.otas.paper import QUERIES
from trimtab_predictor.trace import TraceError, read_trace

TRACE = "twitter_rps_train.csv.gz"
START_SECONDS = 869_160
"""Of the trace, where a bursty stretch begins."""
LEAST_RPS, MOST_RPS = 200.0, 700.0
HOLD_SECONDS = (2, 20)
DENSER = 20
"""Seconds of the trace that make one of the load; the paper makes one of two minutes."""
CALM_RPS, CALM_SHARE = 300.0, 0.6
"""In more than 60 % of the seconds of the paper's trace there are fewer than 300 queries; in some above 600."""


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """When each query comes, and of which type it is."""

    at_seconds: NDArray[np.float64]
    types: NDArray[np.int64]


def synthetic_rps(seconds: int, seed: int) -> NDArray[np.float64]:
    """The rate in each second: plateaus of some seconds."""
    rng = np.random.default_rng(seed)
    rates: list[float] = []
    while len(rates) < seconds:
        rates += [float(rng.uniform(LEAST_RPS, MOST_RPS))] * int(rng.integers(*HOLD_SECONDS, endpoint=True))
    return np.array(rates[:seconds])


def bursty_rps(trace: Path | None, start_seconds: int, seconds: int) -> NDArray[np.float64]:
    """The rate in each second of a trace, made denser and scaled as the paper's; without one bursts are made up.

    Raises:
        TraceError: the seconds are not within the trace, or most hold nothing: no factor makes them the paper's.
    """
    if trace is None:
        rng = np.random.default_rng(0)
        rates = np.repeat(150.0 * rng.lognormal(0.0, 0.8, seconds // 8 + 1), 8)[:seconds]
    else:
        cut = read_trace(trace).excerpt(start_seconds, start_seconds + seconds * DENSER)
        rates = np.nan_to_num(cut.rps).reshape(seconds, DENSER).mean(axis=1)
    calm = float(np.quantile(rates, CALM_SHARE))
    if not calm > 0:
        raise TraceError(
            f"{trace}: in {CALM_SHARE:.0%} of the {seconds} x {DENSER} s from second {start_seconds} nothing comes; "
            f"with other seconds (--trace-start) there is a rate to make {CALM_RPS:g} a second of"
        )
    scaled: NDArray[np.float64] = rates * CALM_RPS / calm
    return scaled


def requests(rates: NDArray[np.float64], factor: float, seed: int) -> Requests:
    """Poisson arrivals at these rates times a factor; each query's type is drawn evenly."""
    rng = np.random.default_rng(seed)
    counts = rng.poisson(rates * factor)
    at = np.sort(np.repeat(np.arange(rates.size), counts) + rng.random(int(counts.sum())))
    return Requests(at, rng.integers(0, len(QUERIES), at.size))
