"""Context of a forecast: recurring changes and usual level in the hours before.

Scheduled jobs, newsletters and bots recur on the minute, so many a jump that nothing announces also happened an hour
ago. The context holds the change of the load at that time, not its level: whether the peak of the next 20 seconds
exceeded that of the 20 seconds before, which is what the reactive forecast missed. No clock is used: a load is compared
with itself, whole periods ago.

The usual level and spread are those of the last ten and thirty minutes, to which an unusual two minutes tend to return.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab_predictor.forecaster import HORIZON_SECONDS

PERIODS_SECONDS = (300, 900, 1800, 3600)
MAX_LAG_SECONDS = 6 * 3600
MEMORY_SECONDS = MAX_LAG_SECONDS + HORIZON_SECONDS
"""Length of history that covers all of it."""
USUAL_SECONDS = (600, 1800)

_LAGS = np.arange(PERIODS_SECONDS[0], MAX_LAG_SECONDS + 1, PERIODS_SECONDS[0])
_IS_WHOLE = np.array([[lag % period == 0 for period in PERIODS_SECONDS] for lag in _LAGS], dtype=np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Context of N moments."""

    recurring: NDArray[np.float64]
    """[N, 4], mean change of the peak one, two, … periods ago, -1 to 1; 0 if unknown."""
    means_rps: NDArray[np.float64]
    """[N, 2], over the last ten and thirty minutes, as far as known."""
    deviations_rps: NDArray[np.float64]
    """[N, 2], over the same."""
    known: NDArray[np.float64]
    """[N], known share of thirty minutes, 0 to 1."""


def load_context(rps: NDArray[np.float64], moments: NDArray[np.int64]) -> Context:
    """The context of each moment from the load before it.

    `rps` has shape [S], in requests per second, NaN if missing; `moments` has shape [N], each the index of the first
    second to come, at most S.
    """
    return Context(_recurring(rps, moments), *_usual(rps, moments))


def peak_changes(rps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Change of the peak at each moment of a load [S]: [S + 1], moment n lies before second n.

    (after − before) / (after + before) of the peaks of the 20 seconds after and before, -1 to 1; 0 if both are 0, NaN
    if any of the 40 seconds is missing or outside the load.
    """
    found = np.full(rps.size + 1, np.nan)
    if rps.size >= 2 * HORIZON_SECONDS:
        peaks = _peaks(rps)
        before, after = peaks[:-HORIZON_SECONDS], peaks[HORIZON_SECONDS:]
        total = before + after
        found[HORIZON_SECONDS:-HORIZON_SECONDS] = (after - before) / np.where(total == 0, 1.0, total)
    return found


def _peaks(rps: NDArray[np.float64]) -> NDArray[np.float64]:
    """The maximum of every 20 seconds of a load [S], NaN if one is missing: [S - 19].

    Maxima over 2, 4, 8, 16 seconds, each of two shorter ones: some twenty times faster than over each window.
    """
    peaks, width = rps, 1
    while width < HORIZON_SECONDS:
        step = min(width, HORIZON_SECONDS - width)
        peaks, width = np.maximum(peaks[:-step], peaks[step:]), width + step
    return peaks


def _recurring(rps: NDArray[np.float64], moments: NDArray[np.int64]) -> NDArray[np.float64]:
    """The mean change over the known earlier moments, shrunk to 0 by one without change: one hour proves little."""
    at = moments[:, None] - _LAGS
    seen = np.where(at >= 0, peak_changes(rps)[np.maximum(at, 0)], np.nan)
    known = np.isfinite(seen)
    means: NDArray[np.float64] = np.where(known, seen, 0.0) @ _IS_WHOLE / (known @ _IS_WHOLE + 1)
    return means


def _usual(
    rps: NDArray[np.float64], moments: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Means and deviations [N, 2] over the last ten and thirty minutes, and the known share of these [N]."""
    oldest = max(int(moments.min(initial=rps.size)) - max(USUAL_SECONDS), 0)
    rps, moments = rps[oldest:], moments - oldest
    known = np.isfinite(rps)
    middle = rps[known].mean() if known.any() else 0.0  # sums of squares far from it would lose digits
    centred = np.where(known, rps - middle, 0.0)
    sums = [np.concatenate([[0.0], np.cumsum(part)]) for part in (known, centred, centred**2)]
    first = np.maximum(moments[:, None] - USUAL_SECONDS, 0)
    seconds, total, squares = (part[moments][:, None] - part[first] for part in sums)
    mean = total / np.maximum(seconds, 1.0)
    deviation = np.sqrt(np.maximum(squares / np.maximum(seconds, 1.0) - mean**2, 0.0))
    return mean + middle, deviation, seconds[:, -1] / USUAL_SECONDS[-1]
