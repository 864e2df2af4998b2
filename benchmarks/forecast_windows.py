"""Forecasts of every forecaster on the same windows of loads of several shapes.

The rules for excerpts of a recorded load are IPA's (section 5.1), on the load divided by five: bursty ranges over more
than 30 and ends a calm stretch, steady stays within a narrow band, fluctuating ranges widely within ten minutes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.observation import lookback_seconds
from trimtab_predictor.context import load_context
from trimtab_predictor.fallback_forecaster import FallbackForecaster
from trimtab_predictor.features import BIN_SECONDS, BINS, HISTORY_SECONDS
from trimtab_predictor.forecaster import HORIZON_SECONDS, smape
from trimtab_predictor.lstm import QUANTILES, LstmForecaster, LstmWeights, forecast_quantiles
from trimtab_predictor.windows import WINDOW_SECONDS, cut_windows, scaled_load

STRIDE_SECONDS = 10
DRAWN_SECONDS = 3_600
DRAWN_LEVELS_RPS = (0.3, 5.0, 60.0, 5000.0)
LSTM, AR, REACTIVE, SERVED = "LSTM", "AR(12)", "reactive", "LSTM as served"
AS_RECORDED = "_at_1_1"
DIVISOR = 5.0
STEP_SECONDS = 60
MOST_EXCERPTS = 6
Load = NDArray[np.float64]
"""Requests per second, [S]; NaN in gaps."""


def _is_bursty(d: Load) -> bool:
    return bool(np.ptp(d) > 30 and abs(d[0] - d[-200]) < 5 and abs(d[0] - d[500]) > 30)


def _is_steady_low(d: Load) -> bool:
    return bool(np.ptp(d) < 9 and d.max() < 20)


def _is_steady_high(d: Load) -> bool:
    return bool(np.ptp(d) < 20 and d.min() > 28)


def _is_fluctuating(d: Load) -> bool:
    return bool(np.ptp(d) > 30)


RULES: Mapping[str, tuple[int, Callable[[Load], bool]]] = {
    "bursty": (1200, _is_bursty),
    "steady_low": (1200, _is_steady_low),
    "steady_high": (600, _is_steady_high),
    "fluctuating": (600, _is_fluctuating),
}
"""Seconds of an excerpt, and what its whole requests per second, divided by five, must look like."""


def excerpts(rps: Load, shape: str) -> list[int]:
    """Where excerpts of a shape begin: the first few that touch no gap and each other not, in seconds."""
    length, matches = RULES[shape]
    found: list[int] = []
    start = 0
    while start + length <= rps.size and len(found) < MOST_EXCERPTS:
        cut = rps[start : start + length]
        if not np.isnan(cut).any() and matches(np.floor(cut / DIVISOR)):
            found.append(start)
            start += length
        else:
            start += STEP_SECONDS
    return found


def drawn(seconds: int, level_rps: float, rng: np.random.Generator) -> dict[str, Load]:
    """Draw the plain shapes at one level, each with Poisson arrivals and without any noise."""
    progress = np.arange(seconds) / seconds
    rates = {
        "constant": np.full(seconds, level_rps),
        "ramp": level_rps * (0.3 + 1.7 * progress),
        "wave": level_rps * (1 + 0.6 * np.sin(2 * np.pi * 6 * progress)),
        "steps": level_rps * np.repeat([1.0, 3.0, 0.5, 2.0, 1.0, 4.0], -(-seconds // 6))[:seconds],
    }
    noisy = {f"{name}_poisson": rng.poisson(rate).astype(np.float64) for name, rate in rates.items()}
    return {f"{name}_exact": rate for name, rate in rates.items()} | noisy


@dataclass(frozen=True, slots=True)
class Forecasts:
    """The peaks of windows, [N], and what each forecaster forecast, [N]."""

    peaks: Load
    by_name: Mapping[str, Load]

    def errors(self) -> dict[str, float]:
        """Return the SMAPE of each forecaster."""
        return {name: smape(forecast, self.peaks) for name, forecast in self.by_name.items()}


class Forecasters:
    """The LSTM with its quantiles and fallbacks, AR(12) fitted to an earlier load, and the reactive forecaster."""

    def __init__(self, earlier: Load, weights: LstmWeights) -> None:
        self._weights = weights
        fit = cut_windows(earlier, STRIDE_SECONDS)
        self._ar_coefficients, *_ = np.linalg.lstsq(_bin_peaks(fit.histories_rps), fit.peaks_rps, rcond=None)

    def forecast(self, load: Load, first: int = 0, end: int | None = None) -> Forecasts:
        """Forecast every ten seconds from `first` until `end`; windows with NaN are left out.

        Two minutes before `first` are history. The served forecaster is called as the adapter calls it, one window
        after another.
        """
        last = (load.size if end is None else end) - WINDOW_SECONDS
        starts = np.arange(max(first - HISTORY_SECONDS, 0), last + 1, STRIDE_SECONDS)
        windows = np.lib.stride_tricks.sliding_window_view(load, WINDOW_SECONDS)[starts]
        complete = ~np.isnan(windows).any(axis=1)
        histories, starts = windows[complete, :HISTORY_SECONDS], starts[complete]
        quantiles = forecast_quantiles(self._weights, histories, load_context(load, starts + HISTORY_SECONDS))
        forecasts = {
            LSTM: quantiles[:, 0],
            **{f"LSTM P{quantile * 100:.0f}": quantiles[:, k] for k, quantile in enumerate(QUANTILES) if k},
            REACTIVE: histories[:, -HORIZON_SECONDS:].max(axis=1),
            AR: _bin_peaks(histories) @ self._ar_coefficients,
            SERVED: _forecast_as_served(self._weights, load, starts),
        }
        return Forecasts(windows[complete, HISTORY_SECONDS:].max(axis=1), forecasts)


def _bin_peaks(histories: Load) -> Load:
    """Return the inputs of AR(12), [N, 13]: the peak of each ten seconds, and a 1 for the intercept."""
    return np.pad(histories.reshape(-1, BINS, BIN_SECONDS).max(axis=2), ((0, 0), (0, 1)), constant_values=1.0)


def _forecast_as_served(weights: LstmWeights, load: Load, starts: NDArray[np.int64]) -> Load:
    """Forecast with all history at first, then with the last ten minutes."""
    forecaster = FallbackForecaster(LstmForecaster(weights))
    peaks, called_at = [], -math.inf
    for end in starts + HISTORY_SECONDS:
        history = load[max(0, end - lookback_seconds(end - called_at)) : end]
        peaks.append(forecaster.forecast(history, float(end)).peak_rps)
        called_at = float(end)
    return np.array(peaks)


def errors_by_shape(earlier: Load, held_back: Load, weights: LstmWeights) -> dict[str, dict[str, float]]:
    """Return each forecaster's error on every shape: excerpts of the trace, also an eighth as large, and drawn ones.

    AR(12) is fitted anew at each size, on the earlier days as a service of that size would have seen them.
    """
    rng = np.random.default_rng(5)
    errors: dict[str, dict[str, float]] = {}
    for factor in (1.0, 8.0):
        forecasters, scaled = Forecasters(scaled_load(earlier, factor), weights), scaled_load(held_back, factor)
        for shape, (length, _) in RULES.items():
            parts = [forecasters.forecast(scaled, at, at + length) for at in excerpts(held_back, shape)]
            if parts:
                errors[f"{shape}_at_1_{factor:g}"] = _pool(parts).errors()
    for level in DRAWN_LEVELS_RPS:
        forecasters = Forecasters(scaled_load(earlier, float(np.nanmean(earlier)) / level), weights)
        for shape, load in drawn(DRAWN_SECONDS, level, rng).items():
            errors[f"{shape}_{level:g}_rps"] = forecasters.forecast(load).errors()
    return errors


def _pool(parts: Sequence[Forecasts]) -> Forecasts:
    pooled = {name: np.concatenate([part.by_name[name] for part in parts]) for name in parts[0].by_name}
    return Forecasts(np.concatenate([part.peaks for part in parts]), pooled)
