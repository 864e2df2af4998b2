"""Window features: the network's inputs, relative to the window's own mean and deviation.

One set of weights then serves loads of any size. Size appears only in how the noise compares to that of independent
arrivals (the index of dispersion): the same variation is chance at sixty requests a second and a change at six
thousand. IPA (§3) uses the maximum of each bin of ten seconds alone, which is mostly noise.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab_predictor.context import PERIODS_SECONDS, USUAL_SECONDS, Context
from trimtab_predictor.forecaster import HORIZON_SECONDS

HISTORY_SECONDS = 120
BIN_SECONDS = 10
BINS = HISTORY_SECONDS // BIN_SECONDS
FEATURES = 7 + len(PERIODS_SECONDS) + 2 * len(USUAL_SECONDS) + 1
MIN_SPREAD = 1e-9
"""Below it, seconds differ by rounding only."""
MIN_RATIO = 0.05
"""No peak is forecast below this share of the window's mean."""
MAX_DEVIATIONS = 8.0
MIN_DISPERSION, MAX_DISPERSION = 0.02, 4.0


@dataclass(frozen=True, slots=True, eq=False)
class WindowFeatures:
    """Inputs of N windows, and what converts the network's outputs to requests per second."""

    inputs: NDArray[np.float64]
    """[N, 12, 16]."""
    means: NDArray[np.float64]
    """[N], requests per second."""
    spreads: NDArray[np.float64]
    """[N], standard deviation over mean; 0 if all seconds are equal."""
    peaks: NDArray[np.float64]
    """[N], the peak of the last 20 seconds, in deviations above the mean; 0 without variation."""


def window_features(windows_rps: NDArray[np.float64], context: Context) -> WindowFeatures:
    """Features of windows of load [N, 120], no NaN, relative to their own means and deviations.

    Five figures per bin: maximum, mean, mean + deviation, maximum and mean of its newer half, each in deviations of the
    window from its mean. Each bin also has the size of that deviation on logarithmic scales: relative to the mean, and
    to that of independent arrivals. And the context: the expected change of the peak, in deviations, if it repeats that
    of one, two, … periods ago, the usual level and spread, and the known share of these.
    """
    means, deviations = windows_rps.mean(axis=1), windows_rps.std(axis=1)
    varies = deviations > MIN_SPREAD * means
    unit = np.where(varies, deviations, 1.0)
    spreads = np.where(varies, deviations, 0.0) / np.where(means > 0, means, 1.0)

    def relative(figures: NDArray[np.float64]) -> NDArray[np.float64]:
        by_window = (-1,) + (1,) * (figures.ndim - 1)
        deviating = (figures - means.reshape(by_window)) / unit.reshape(by_window)
        return np.where(varies.reshape(by_window), deviating, 0.0)

    bins = windows_rps.reshape(-1, BINS, BIN_SECONDS)
    newer = bins[:, :, BIN_SECONDS // 2 :]
    level = bins.mean(axis=2)
    figures = [bins.max(axis=2), level, level + bins.std(axis=2), newer.max(axis=2), newer.mean(axis=2)]
    size = np.log(np.maximum(spreads, 1e-3)) / 3 + 0.5  # about -2 to 1 from the calmest load to the sparsest
    shown = np.clip(relative(np.stack(figures, axis=2)), -MAX_DEVIATIONS, MAX_DEVIATIONS)
    newest = windows_rps[:, -HORIZON_SECONDS:].max(axis=1)
    dispersion = np.log(np.maximum(spreads**2 * means, MIN_DISPERSION)) / 2  # 0 where arrivals are independent
    sizes = np.stack([size, np.minimum(dispersion, MAX_DISPERSION), context.known], axis=1)
    constant = np.concatenate([sizes, _context_features(context, newest, means, unit) * varies[:, None]], axis=1)
    repeated = np.broadcast_to(constant[:, None, :], (*level.shape, constant.shape[1]))
    return WindowFeatures(np.concatenate([shown, repeated], axis=2), means, spreads, relative(newest))


def _context_features(
    context: Context, newest_rps: NDArray[np.float64], means: NDArray[np.float64], unit: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The context of each window in its deviations: [N, 4 rises of the peak, 2 levels, 2 log spreads]."""
    deviations = unit[:, None]
    ratios = 2 * context.recurring / np.maximum(1 - context.recurring, MIN_RATIO)  # of the rise to the peak
    rises, levels = ratios * newest_rps[:, None] / deviations, (context.means_rps - means[:, None]) / deviations
    spreads = np.log(np.maximum(context.deviations_rps / deviations, MIN_RATIO))
    shown: NDArray[np.float64] = np.concatenate([rises, levels, spreads], axis=1)
    return shown.clip(-MAX_DEVIATIONS, MAX_DEVIATIONS)
