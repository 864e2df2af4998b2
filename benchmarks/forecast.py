"""Forecast benchmark: every forecaster on the same windows of a recorded load, and by its shape."""

import argparse
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.forecast_windows import (
    AR,
    AS_RECORDED,
    LSTM,
    REACTIVE,
    SERVED,
    STRIDE_SECONDS,
    Forecasters,
    Forecasts,
    Load,
    errors_by_shape,
)
from benchmarks.harness.report import Report, print_table
from trimtab_predictor.context import MEMORY_SECONDS
from trimtab_predictor.lstm import QUANTILES, SHIPPED_WEIGHTS, LstmForecaster, LstmWeights
from trimtab_predictor.trace import TraceError, read_trace
from trimtab_predictor.windows import WINDOW_SECONDS, cut_windows, hold_back, scaled_load

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
