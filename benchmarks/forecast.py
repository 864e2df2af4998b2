"""Forecast benchmark: every forecaster on the same windows of a recorded load, and by its shape.

The rules for excerpts of a recorded load are IPA's (section 5.1), on the load divided by five: bursty ranges over more
than 30 and ends a calm stretch, steady stays within a narrow band, fluctuating ranges widely within ten minutes.
"""

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.report import Report, print_table
from trimtab_adapter.observation import lookback_seconds
from trimtab_predictor.context import MEMORY_SECONDS, load_context
from trimtab_predictor.fallback_forecaster import FallbackForecaster
from trimtab_predictor.features import BIN_SECONDS, BINS, HISTORY_SECONDS
from trimtab_predictor.forecaster import HORIZON_SECONDS, smape
from trimtab_predictor.lstm import QUANTILES, SHIPPED_WEIGHTS, LstmForecaster, LstmWeights, forecast_quantiles
from trimtab_predictor.trace import TraceError, read_trace
from trimtab_predictor.windows import WINDOW_SECONDS, cut_windows, hold_back, scaled_load

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


RULES: Mapping[str, tuple[int, Callable[[Load], bool | np.bool]]] = {
    "bursty": (1200, lambda d: np.ptp(d) > 30 and abs(d[0] - d[-200]) < 5 and abs(d[0] - d[500]) > 30),
    "steady_low": (1200, lambda d: np.ptp(d) < 9 and d.max() < 20),
    "steady_high": (600, lambda d: np.ptp(d) < 20 and d.min() > 28),
    "fluctuating": (600, lambda d: np.ptp(d) > 30),
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


SMALLEST_FACTOR = 1 / 80
MAX_FORECAST_SECONDS = 0.005
LSTM_OVER_AR = 0.83
MIN_WINDOWS = 20
HELD_BACK_SECONDS = 3 * 86_400
TIMED_FORECASTS = 500
SHOWN = (SERVED, LSTM, AR, REACTIVE)
COLUMNS = ("load", *SHOWN, "over AR(12)")


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks forecast", description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--fit", type=Path, help="another trace to fit AR(12) on")
    parser.add_argument("--weights", type=Path, default=SHIPPED_WEIGHTS)
    options = parser.parse_args()
    whole = read_trace(options.trace).rps
    earlier, held_back = (read_trace(options.fit).rps, whole) if options.fit else hold_back(whole, HELD_BACK_SECONDS)
    try:
        _require_windows(earlier, held_back)
    except TraceError as error:
        fitted = f", with {options.fit} to fit on" if options.fit else ""
        raise TraceError(f"{options.trace}{fitted}: {error}") from error
    return _measure(earlier, held_back, LstmWeights.load(options.weights)).finish()


def _require_windows(earlier: Load, held_back: Load) -> None:
    """Check a load as it is and enlarged, which widens its gaps; a smaller one has the same windows."""
    for factor in (1.0, SMALLEST_FACTOR):
        fit, score = (len(cut_windows(scaled_load(part, factor), STRIDE_SECONDS)) for part in (earlier, held_back))
        if min(fit, score) < MIN_WINDOWS:
            raise TraceError(
                f"only {fit} windows to fit AR(12) and {score} to score; at least {MIN_WINDOWS} of {WINDOW_SECONDS} "
                "seconds without a gap are needed in each part"
            )


def _measure(earlier: Load, held_back: Load, weights: LstmWeights) -> Report:
    forecasts = Forecasters(earlier, weights).forecast(held_back)
    errors, shapes = forecasts.errors(), errors_by_shape(earlier, held_back, weights)
    rows = {"held-back days": errors, **shapes}
    print_table(COLUMNS, [_table_row(name, row) for name, row in rows.items()], "SMAPE")
    report = Report("bench-forecast", {"windows": len(forecasts.peaks)})
    report.add({f"smape_{_key(name)}": round(error, 5) for name, error in errors.items()})
    report.add(_quantile_figures(forecasts))
    for shape, row in shapes.items():
        report.add({f"smape_{_key(name)}_{shape}": round(row[name], 5) for name in SHOWN})
    worst = max(shapes, key=lambda shape: _excess(shapes[shape]))
    report.add({"worst_shape_against_reactive": worst})
    report.hold("LSTM SMAPE over AR(12)'s", round(errors[LSTM] / errors[AR], 4), "<=", LSTM_OVER_AR)
    report.hold("SMAPE as served above reactive's, worst shape", round(_excess(shapes[worst]), 5), "<=", 0.0)
    report.hold("forecast p99 seconds", round(_forecast_seconds(weights), 5), "<=", MAX_FORECAST_SECONDS)
    ratios = {shape: row[LSTM] / row[AR] for shape, row in shapes.items() if shape.endswith(AS_RECORDED)}
    if ratios:  # a trace may have none of the shapes
        hardest = max(ratios, key=lambda shape: ratios[shape])
        report.add({"hardest_shape_against_ar12": hardest})
        report.hold("LSTM SMAPE over AR(12)'s, hardest shape", round(ratios[hardest], 4), "<=", LSTM_OVER_AR)
    return report


def _quantile_figures(forecasts: Forecasts) -> dict[str, float]:
    """Return the share of peaks below each quantile, and its pinball loss over the mean peak."""
    figures = {}
    for quantile in QUANTILES:
        above = forecasts.peaks - forecasts.by_name[LSTM if quantile == 0.5 else f"LSTM P{quantile * 100:.0f}"]
        loss = np.maximum(quantile * above, (quantile - 1) * above).mean() / forecasts.peaks.mean()
        figures[f"share_below_p{quantile * 100:.0f}"] = round(float((above <= 0).mean()), 4)
        figures[f"pinball_p{quantile * 100:.0f}_of_mean_peak"] = round(float(loss), 4)
    return figures


def _forecast_seconds(weights: LstmWeights) -> float:
    """Return the p99 of the time that one forecast takes."""
    forecaster = LstmForecaster(weights)
    history = np.random.default_rng(1).poisson(30.0, MEMORY_SECONDS).astype(np.float64)
    seconds = []
    for _ in range(TIMED_FORECASTS):
        started = time.perf_counter()
        forecaster.forecast(history, 0.0)
        seconds.append(time.perf_counter() - started)
    return float(np.quantile(seconds, 0.99))


def _excess(errors: Mapping[str, float]) -> float:
    return errors[SERVED] - errors[REACTIVE]


def _key(name: str) -> str:
    return name.lower().replace(" ", "_").replace("(", "").replace(")", "")


def _table_row(name: str, errors: Mapping[str, float]) -> tuple[str, ...]:
    ratio = errors[SERVED] / errors[AR] if errors[AR] else 0.0
    return (name, *(f"{errors[forecaster]:.2%}" for forecaster in SHOWN), f"{ratio:.2f}")
