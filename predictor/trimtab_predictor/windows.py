"""Training windows: histories with the peak that followed, and synthetic variants of a recorded load.

A service at 5 requests per second sees the same rises and falls as one at 60, under more noise. Thinning a trace (each
request is kept with probability 1/factor) gives exactly what a smaller service would have seen; thickening (Poisson
around the smoothed rate) a larger one.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab_predictor.context import PERIODS_SECONDS, Context, load_context
from trimtab_predictor.features import HISTORY_SECONDS
from trimtab_predictor.forecaster import HORIZON_SECONDS

WINDOW_SECONDS = HISTORY_SECONDS + HORIZON_SECONDS
SMOOTHING_SECONDS = 15
MIN_SYNTHETIC_RPS, MAX_SYNTHETIC_RPS = 0.3, 10_000.0
CLOCK_JUMP_SECONDS = 8 * 3600
MAX_BURST = 100


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """Histories [N, 120], their contexts, and the peaks that followed [N]; requests per second."""

    histories_rps: NDArray[np.float64]
    context: Context
    peaks_rps: NDArray[np.float64]

    def __len__(self) -> int:
        return int(self.peaks_rps.size)


def cut_windows(rps: NDArray[np.float64], stride_seconds: int) -> Windows:
    """Cut every whole window without a gap, one every `stride_seconds`."""
    starts = np.arange(0, max(rps.size - WINDOW_SECONDS + 1, 0), stride_seconds)
    missing = np.concatenate([[0], np.cumsum(np.isnan(rps))])
    starts = starts[missing[starts + WINDOW_SECONDS] == missing[starts]]
    cut = rps[starts[:, None] + np.arange(WINDOW_SECONDS)]
    context = load_context(rps, starts + HISTORY_SECONDS)
    return Windows(cut[:, :HISTORY_SECONDS], context, cut[:, HISTORY_SECONDS:].max(axis=1))


def hold_back(
    rps: NDArray[np.float64], max_seconds: float = math.inf
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Split a load by time into a training part and the newest quarter, at most `max_seconds` long, to score on."""
    first = rps.size - int(min(max_seconds, rps.size // 4))
    return rps[:first], rps[first:]


def thin(rps: NDArray[np.float64], factor: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Keep each request with probability 1/factor; factor at least 1, gaps stay gaps."""
    if factor == 1:
        return rps
    gaps = np.isnan(rps)
    kept = rng.binomial(np.where(gaps, 0, rps).astype(np.int64), 1 / factor).astype(np.float64)
    return np.where(gaps, np.nan, kept)


def thicken(rps: NDArray[np.float64], factor: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """The load of a service `factor` times as large; gaps stay gaps, slightly widened."""
    smooth = np.convolve(rps, np.full(SMOOTHING_SECONDS, 1 / SMOOTHING_SECONDS), mode="same")
    gaps = np.isnan(smooth)
    return np.where(gaps, np.nan, rng.poisson(np.where(gaps, 0.0, smooth) * factor).astype(np.float64))


def scaled_load(rps: NDArray[np.float64], divisor: float) -> NDArray[np.float64]:
    """Thin by a divisor of at least 1, thicken by one below; the same random draw for the same divisor."""
    rng = np.random.default_rng(round(divisor * 1000))
    return thin(rps, divisor, rng) if divisor >= 1 else thicken(rps, 1 / divisor, rng)


def synthetic_load(seconds: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """A load of plateaus, ramps and waves of 2 minutes to 2 hours at rates from 0.3 to 10,000 rps.

    A recorded trace has few slopes, and the marks of one clock only. Half of the segments are Poisson, half of those
    with clients that send up to a hundred requests at once, and in half of the eight-hour stretches with jumps that
    recur at marks of a clock; the others have no noise, as generated loads can be.
    """
    segments: list[NDArray[np.float64]] = []
    total, level = 0, 1.0
    while total < seconds:
        length = round(float(np.exp(rng.uniform(np.log(120), np.log(7200)))))
        level = _next_level(level, rng) if segments else _any_level(rng)
        segments.append(level * _shape(length, rng))
        total += length
    rates = np.concatenate(segments)[:seconds]
    sizes = [segment.size for segment in segments]
    is_noisy = np.repeat(rng.random(len(segments)) < 0.5, sizes)[:seconds]
    at_once = np.where(rng.random(len(segments)) < 0.5, 1.0, MAX_BURST ** rng.random(len(segments)))
    together = np.repeat(np.round(at_once), sizes)[:seconds]
    return np.where(is_noisy, together * rng.poisson(rates * clock_jumps(seconds, rng) / together), rates)


def _any_level(rng: np.random.Generator) -> float:
    return float(np.exp(rng.uniform(np.log(MIN_SYNTHETIC_RPS), np.log(MAX_SYNTHETIC_RPS))))


def _next_level(level: float, rng: np.random.Generator) -> float:
    """The level of the next segment: mostly near the last one, sometimes anywhere."""
    if rng.random() < 0.2:
        return _any_level(rng)
    return float(np.clip(level * np.exp(rng.normal(0.0, 0.7)), MIN_SYNTHETIC_RPS, MAX_SYNTHETIC_RPS))


def _shape(length: int, rng: np.random.Generator) -> NDArray[np.float64]:
    seconds = np.arange(length)
    match rng.integers(3):
        case 0:
            return np.ones(length)
        case 1:
            return 1 + (rng.uniform(0.2, 5) - 1) * seconds / length
        case _:
            period = float(np.exp(rng.uniform(np.log(100), np.log(3600))))
            return 1 + rng.uniform(0.1, 0.8) * np.sin(2 * np.pi * (seconds / period + rng.random()))


def clock_jumps(seconds: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Factors [seconds] of jumps at marks of a clock, in half of the eight-hour stretches."""
    times = np.ones(seconds)
    for start in range(0, seconds, CLOCK_JUMP_SECONDS):
        if rng.random() < 0.5:
            block = np.arange(start, min(start + CLOCK_JUMP_SECONDS, seconds))
            since = (block + rng.integers(3600)) % rng.choice(PERIODS_SECONDS)
            jump, lasts = rng.uniform(1.2, 3.0), rng.integers(2, 30)
            times[block] = np.where(since < lasts, jump, 1.0)
    return times
