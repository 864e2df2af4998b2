"""Benchmark of all forecasters on the same windows; the last line is the outcome as JSON.

    python -m benchmarks.forecast --trace FILE [--fit FILE] [--rps-per-core 30]

The last days of the trace are scored, the earlier ones fit AR(12); with --fit another trace does, and all of --trace
is scored. Beside the error: by workload shape, by quantile, and what an error costs: cores that stand idle because the
forecast was too high, requests beyond it because it was too low.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.forecast_windows import (
    AS_RECORDED,
    KNOWN_RATE,
    SERVED,
    STRIDE_SECONDS,
    Judge,
    Load,
    Moments,
    by_shape,
    rebuilt,
)
from trimtab.app import run_reporting_errors
from trimtab_pipelines.result_line import ResultLine, threshold
from trimtab_predictor.context import MEMORY_SECONDS
from trimtab_predictor.forecaster import smape
from trimtab_predictor.lstm import QUANTILES, SHIPPED_WEIGHTS, LstmForecaster, LstmWeights
from trimtab_predictor.trace import TraceError, read_trace
from trimtab_predictor.windows import WINDOW_SECONDS, cut_windows, hold_back, scaled_load

DAY_SECONDS = 86_400
FACTORS = (1.0, 8.0, 30.0, 1 / 16, 1 / 80)
TIMED_FORECASTS = 500
LSTM_OVER_AR = 0.83
MIN_WINDOWS = 20


def costs(moments: Moments, rps_per_core: float) -> dict[str, tuple[float, float]]:
    """Return for each forecaster the mean idle cores of its overestimates and the share of requests beyond it.

    The capacity is what was forecast; of each second's requests, those above it count as beyond.
    """
    total = moments.futures.sum()
    table = {}
    for name, said in moments.forecasts.items():
        idle = np.maximum(said - moments.peaks, 0).mean() / rps_per_core
        beyond = np.maximum(moments.futures - said[:, None], 0).sum() / total
        table[name] = (float(idle), float(beyond))
    return table


def quantile_figures(moments: Moments) -> dict[str, float]:
    """For each quantile the share of peaks below it, and its pinball loss over the mean peak."""
    figures = {}
    for quantile in QUANTILES:
        said = moments.forecasts["LSTM" if quantile == 0.5 else f"LSTM P{quantile * 100:.0f}"]
        above = moments.peaks - said
        loss = np.maximum(quantile * above, (quantile - 1) * above).mean() / moments.peaks.mean()
        figures[f"share_below_p{quantile * 100:.0f}"] = float((above <= 0).mean())
        figures[f"pinball_p{quantile * 100:.0f}_of_mean_peak"] = float(loss)
    return figures


def prediction_seconds(weights: LstmWeights) -> float:
    """The p99 of the time one forecast takes."""
    forecaster = LstmForecaster(weights)
    history = np.random.default_rng(1).poisson(30.0, MEMORY_SECONDS).astype(np.float64)
    spent = []
    for _ in range(TIMED_FORECASTS):
        started = time.perf_counter()
        forecaster.forecast(history, 0.0)
        spent.append(time.perf_counter() - started)
    return float(np.quantile(spent, 0.99))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print tables and the outcome; 0 when every bar holds, 1 when one does not, 2 for a trace that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forecast", description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--fit", type=Path, help="another trace to fit AR(12) on")
    parser.add_argument("--weights", type=Path, default=SHIPPED_WEIGHTS)
    parser.add_argument("--rps-per-core", type=float, default=30.0, help="to count idle cores with")
    return run_reporting_errors(partial(_judge, parser.parse_args(arguments)))


def _judge(given: argparse.Namespace) -> int:
    whole = read_trace(given.trace).rps
    learned, held_back = (read_trace(given.fit).rps, whole) if given.fit else hold_back(whole, 3 * DAY_SECONDS)
    try:
        _require_windows(learned, held_back)
    except TraceError as error:
        fitted = f", with {given.fit} to fit on" if given.fit else ""
        raise TraceError(f"{given.trace}{fitted}: {error}") from error
    weights = LstmWeights.load(given.weights)
    outcome = _measure(whole, learned, held_back, weights, given.rps_per_core)
    outcome.print()
    return 0 if outcome.holds else 1


def _require_windows(learned: Load, held_back: Load) -> None:
    """Of a load as it is and made larger, which widens gaps; made smaller it has the same."""
    for factor in (1.0, min(FACTORS)):
        fit, score = (len(cut_windows(scaled_load(part, factor), STRIDE_SECONDS)) for part in (learned, held_back))
        if min(fit, score) < MIN_WINDOWS:
            raise TraceError(
                f"only {fit} windows to fit AR(12) and {score} to score; at least {MIN_WINDOWS} of {WINDOW_SECONDS} "
                "seconds without a gap are needed in each part"
            )


def _measure(whole: Load, learned: Load, held_back: Load, weights: LstmWeights, rps_per_core: float) -> ResultLine:
    judge = Judge(learned, weights)
    first = whole.size - held_back.size
    earlier = np.concatenate([np.full(DAY_SECONDS, np.nan), whole])[first : first + held_back.size]
    moments = judge.ask(held_back, before=earlier)
    errors, cost = moments.errors(), costs(moments, rps_per_core)
    figures: dict[str, float | int | str | None] = {"moments": len(moments.peaks)}
    figures |= {f"smape_{_key(name)}": round(error, 5) for name, error in errors.items()}
    figures |= {f"idle_cores_{_key(name)}": round(idle, 3) for name, (idle, _) in cost.items()}
    figures |= {f"requests_beyond_{_key(name)}": round(beyond, 5) for name, (_, beyond) in cost.items()}
    figures |= {name: round(value, 4) for name, value in quantile_figures(moments).items()}
    figures["smape_lstm_on_rebuilt_seconds"] = round(_error_on_rebuilt(judge, held_back, moments), 5)
    for factor in FACTORS[1:]:
        row = Judge(scaled_load(learned, factor), weights).ask(scaled_load(held_back, factor), served=False).errors()
        figures |= {
            f"smape_{_key(name)}_at_1_{factor:g}": round(row[name], 5) for name in ("LSTM", "AR(12)", "reactive")
        }
    shapes = by_shape(learned, held_back, weights)
    _show(errors, cost, shapes)
    figures |= {
        f"smape_{_key(name)}_{shape}": round(row[name], 5)
        for shape, row in shapes.items()
        for name in (SERVED, "LSTM", "AR(12)", "reactive", KNOWN_RATE)
        if name in row
    }
    ratios = {shape: row["LSTM"] / row["AR(12)"] for shape, row in shapes.items() if shape.endswith(AS_RECORDED)}
    worst = max(shapes, key=lambda shape: _excess(shapes[shape]))
    figures["worst_shape_against_reactive"] = worst
    bars = [
        threshold("LSTM SMAPE over AR(12)'s", round(errors["LSTM"] / errors["AR(12)"], 4), "<=", LSTM_OVER_AR),
        threshold("SMAPE as served above reactive's, worst shape", round(_excess(shapes[worst]), 5), "<=", 0.0),
        threshold("forecast p99 seconds", round(prediction_seconds(weights), 5), "<=", 0.005),
    ]
    if ratios:  # a trace may have none of the shapes
        hardest = max(ratios, key=lambda shape: ratios[shape])
        figures["hardest_shape_against_ar12"] = hardest
        bars.append(threshold("LSTM SMAPE over AR(12)'s, hardest shape", round(ratios[hardest], 4), "<=", LSTM_OVER_AR))
    return ResultLine(name="bench-forecast", figures=figures, bars=tuple(bars))


def _error_on_rebuilt(judge: Judge, load: Load, moments: Moments) -> float:
    return smape(judge.ask(rebuilt(load), served=False).forecasts["LSTM"], moments.peaks)


_SHOWN = (SERVED, "LSTM", "AR(12)", "reactive", "last-max", KNOWN_RATE)


def _excess(row: Mapping[str, float]) -> float:
    return row[SERVED] - row["reactive"]


def _key(name: str) -> str:
    return name.lower().replace(" ", "_").replace("(", "").replace(")", "").replace("-", "_")


def _show(
    errors: Mapping[str, float], cost: Mapping[str, tuple[float, float]], shapes: Mapping[str, Mapping[str, float]]
) -> None:
    console = Console(width=120)
    table = Table("forecaster", "SMAPE", "idle cores", "requests beyond", title="held-back days")
    for name in sorted(errors, key=lambda one: errors[one]):
        table.add_row(name, f"{errors[name]:.2%}", f"{cost[name][0]:.2f}", f"{cost[name][1]:.3%}")
    console.print(table)
    table = Table("shape", *_SHOWN, "over AR(12)", title="SMAPE by shape")
    for shape, row in shapes.items():
        ratio = row[SERVED] / row["AR(12)"] if row["AR(12)"] else 0.0
        table.add_row(shape, *(f"{row[name]:.2%}" if name in row else "" for name in _SHOWN), f"{ratio:.2f}")
    console.print(table)
