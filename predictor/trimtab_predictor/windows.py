"""Cuts traces into what a forecaster sees and what came, and makes other loads out of a recorded one.

A service at 5 requests per second sees the same rises and falls as one at 60, under far more noise. Thinning a trace
(each request is kept with probability 1/factor) gives exactly what a smaller service would have seen; thickening
(Poisson around the smoothed rate) a larger one.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab_predictor.forecaster import HORIZON_SECONDS
from trimtab_predictor.lstm import HISTORY_SECONDS

WINDOW_SECONDS = HISTORY_SECONDS + HORIZON_SECONDS
SMOOTHING_SECONDS = 15


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Histories [N, 120] and the peaks that followed [N]; requests per second."""

    histories_rps: NDArray[np.float64]
    peaks_rps: NDArray[np.float64]

    def __len__(self) -> int:
        return int(self.peaks_rps.size)


def cut_windows(rps: NDArray[np.float64], stride_seconds: int) -> Windows:
    """Cut every whole window that touches no gap, beginning every `stride_seconds`."""
    if rps.size < WINDOW_SECONDS:
        return Windows(np.empty((0, HISTORY_SECONDS)), np.empty(0))
    starts = np.arange(0, rps.size - WINDOW_SECONDS + 1, stride_seconds)
    missing = np.concatenate([[0], np.cumsum(np.isnan(rps))])
    starts = starts[missing[starts + WINDOW_SECONDS] == missing[starts]]
    cut = np.lib.stride_tricks.sliding_window_view(rps, WINDOW_SECONDS)[starts]
    return Windows(cut[:, :HISTORY_SECONDS], cut[:, HISTORY_SECONDS:].max(axis=1))


def thinned(rps: NDArray[np.float64], factor: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Keep each request with probability 1/factor; factor at least 1, gaps stay gaps."""
    if factor == 1:
        return rps
    gaps = np.isnan(rps)
    kept = rng.binomial(np.where(gaps, 0, rps).astype(np.int64), 1 / factor).astype(np.float64)
    return np.where(gaps, np.nan, kept)


def thickened(rps: NDArray[np.float64], factor: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw the load of a service `factor` times as large; gaps stay gaps, a little widened."""
    smooth = np.convolve(rps, np.full(SMOOTHING_SECONDS, 1 / SMOOTHING_SECONDS), mode="same")
    gaps = np.isnan(smooth)
    return np.where(gaps, np.nan, rng.poisson(np.where(gaps, 0.0, smooth) * factor).astype(np.float64))


def drawn_shapes(seconds: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw a load of plateaus, ramps and waves, in pieces of 2 to 10 minutes at rates from 0.3 to 10,000 rps.

    A recorded trace shows few slopes. Half the pieces are Poisson, half without any noise, as generated loads can be.
    """
    pieces = []
    total = 0
    while total < seconds:
        length = int(rng.integers(120, 600))
        level = float(np.exp(rng.uniform(np.log(0.3), np.log(10_000))))
        rates = level * _shape(length, rng)
        pieces.append(rng.poisson(rates).astype(np.float64) if rng.random() < 0.5 else rates)
        total += length
    return np.concatenate(pieces)[:seconds]


def _shape(length: int, rng: np.random.Generator) -> NDArray[np.float64]:
    progress = np.arange(length) / length
    match rng.integers(3):
        case 0:
            return np.ones(length)
        case 1:
            return 1 + (rng.uniform(0.2, 5) - 1) * progress
        case _:
            cycles = rng.uniform(0.5, 4)
            return 1 + rng.uniform(0.1, 0.8) * np.sin(2 * np.pi * (cycles * progress + rng.random()))
