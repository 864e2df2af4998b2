"""How good are the forecasts? Every forecaster on the same windows; the last line is the outcome as JSON.

    python -m benchmarks.forecast --trace FILE [--fit FILE] [--rps-per-core 30]

The last days of the trace are scored, the earlier ones fit AR(12); with --fit another trace does, and all of --trace
is scored. Beside the error: by workload shape, by quantile, and what an error costs: cores that stand idle because the
forecast was too high, requests beyond it because it was too low.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from trimtab_pipelines.outcome import Outcome, bar
from trimtab_predictor.accuracy import smape
from trimtab_predictor.bins import seconds_of_bins
from trimtab_predictor.evaluate import LSTM_OVER_AR, STRIDE_SECONDS, ar_forecaster, scaled_load, split
from trimtab_predictor.forecaster import HORIZON_SECONDS
from trimtab_predictor.guarded import shipped_forecaster
from trimtab_predictor.lstm import (
    BIN_SECONDS,
    BINS,
    HISTORY_SECONDS,
    QUANTILES,
    SHIPPED_WEIGHTS,
    LstmForecaster,
    LstmWeights,
    forecast_quantiles,
)
from trimtab_predictor.shapes import RULES, drawn, excerpts
from trimtab_predictor.trace import TraceError, read_trace
from trimtab_predictor.windows import WINDOW_SECONDS, cut_windows

DAY_SECONDS = 86_400
DRAWN_SECONDS = 3_600
DRAWN_LEVELS_RPS = (0.3, 5.0, 60.0, 5000.0)
FACTORS = (1.0, 8.0, 30.0, 1 / 16, 1 / 80)
TIMED_FORECASTS = 500
SERVED = "LSTM as served"
Load = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Moments:
    """When forecasts were due: histories [N, 120], the 20 s that followed [N, 20], forecasts by name [N]."""

    histories: Load
    futures: Load
    forecasts: Mapping[str, Load]

    @property
    def peaks(self) -> Load:
        """What came, [N]."""
        peaks: Load = self.futures.max(axis=1)
        return peaks

    def errors(self) -> dict[str, float]:
        """Return the SMAPE of each forecaster."""
        return {name: smape(said, self.peaks) for name, said in self.forecasts.items()}


class Judge:
    """Asks every forecaster about the same loads."""

    def __init__(self, learned: Load, weights: LstmWeights) -> None:
        self._weights = weights
        self._ar = ar_forecaster(cut_windows(learned, STRIDE_SECONDS))

    def ask(self, load: Load, *, served: bool = True, before: Load | None = None) -> Moments:
        """Return what each forecaster said every ten seconds of a load [S]; NaN seconds are left out.

        Args:
            load: requests per second.
            served: also play the load through the forecaster as the adapter uses it, one moment after the other.
            before: the load one day earlier [S], for the seasonal forecast.
        """
        starts = np.arange(0, load.size - WINDOW_SECONDS + 1, STRIDE_SECONDS)
        view = np.lib.stride_tricks.sliding_window_view(load, WINDOW_SECONDS)[starts]
        whole = ~np.isnan(view).any(axis=1)
        histories, futures = view[whole, :HISTORY_SECONDS], view[whole, HISTORY_SECONDS:]
        quantiles = forecast_quantiles(self._weights, histories)
        reactive = histories[:, -HORIZON_SECONDS:].max(axis=1)
        said = {
            "LSTM": quantiles[:, 0],
            "reactive": reactive,
            "last-max": histories[:, -BIN_SECONDS:].max(axis=1),
            "AR(12)": self._ar(histories),
            "oracle": futures.max(axis=1),
        }
        said |= {f"LSTM P{q * 100:.0f}": quantiles[:, k] for k, q in enumerate(QUANTILES) if k}
        if before is not None:
            ended = np.lib.stride_tricks.sliding_window_view(before, WINDOW_SECONDS)[starts][whole, HISTORY_SECONDS:]
            yesterday = np.where(np.isnan(ended), -np.inf, ended).max(axis=1)
            said["seasonal"] = np.where(np.isfinite(yesterday), yesterday, reactive)
        if served:
            said[SERVED] = _served(load, starts[whole])
        return Moments(histories, futures, said)


def _served(load: Load, starts: NDArray[np.int64]) -> Load:
    forecaster = shipped_forecaster()
    ends = starts + HISTORY_SECONDS
    answers = [forecaster.forecast(load[max(0, end - 600) : end], float(end)).peak_rps for end in ends]
    return np.array(answers)


def by_shape(learned: Load, held_back: Load, weights: LstmWeights) -> dict[str, dict[str, float]]:
    """Return each forecaster's error on every shape: excerpts of the trace, also an eighth as large, and drawn ones.

    AR(12) is fitted anew at each size, on the earlier days as a service of that size would have seen them.
    """
    rng = np.random.default_rng(5)
    found: dict[str, dict[str, float]] = {}
    for factor in (1.0, 8.0):
        judge, scaled = Judge(scaled_load(learned, factor), weights), scaled_load(held_back, factor)
        for shape, (length, _) in RULES.items():
            # Two minutes before an excerpt are history, so that its first second is forecast, too.
            pieces = [scaled[max(0, at - HISTORY_SECONDS) : at + length] for at in excerpts(held_back, shape)]
            if pieces:
                found[f"{shape}_at_1_{factor:g}"] = _pooled([judge.ask(piece) for piece in pieces])
    for level in DRAWN_LEVELS_RPS:
        judge = Judge(scaled_load(learned, float(np.nanmean(learned)) / level), weights)
        for shape, load in drawn(DRAWN_SECONDS, level, rng).items():
            found[f"{shape}_{level:g}_rps"] = judge.ask(load).errors()
    return found


def _pooled(parts: Sequence[Moments]) -> dict[str, float]:
    names = parts[0].forecasts
    peaks = np.concatenate([part.peaks for part in parts])
    return {name: smape(np.concatenate([part.forecasts[name] for part in parts]), peaks) for name in names}


def costs(moments: Moments, rps_per_core: float) -> dict[str, tuple[float, float]]:
    """Return for each forecaster the cores idle on average because it said too much, and the share of requests beyond.

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
    """Return for each quantile the share of peaks below it, and its pinball loss over the mean peak."""
    figures = {}
    for quantile in QUANTILES:
        said = moments.forecasts["LSTM" if quantile == 0.5 else f"LSTM P{quantile * 100:.0f}"]
        above = moments.peaks - said
        loss = np.maximum(quantile * above, (quantile - 1) * above).mean() / moments.peaks.mean()
        figures[f"share_below_p{quantile * 100:.0f}"] = float((above <= 0).mean())
        figures[f"pinball_p{quantile * 100:.0f}_of_mean_peak"] = float(loss)
    return figures


def prediction_seconds(weights: LstmWeights) -> float:
    """Return the p99 of the time one forecast takes."""
    forecaster = LstmForecaster(weights)
    history = np.random.default_rng(1).poisson(30.0, 600).astype(np.float64)
    spent = []
    for _ in range(TIMED_FORECASTS):
        started = time.perf_counter()
        forecaster.forecast(history, 0.0)
        spent.append(time.perf_counter() - started)
    return float(np.quantile(spent, 0.99))


def rebuilt_error(moments: Moments, weights: LstmWeights) -> float:
    """Return the LSTM's error where it sees what a metrics server keeps: a peak and a mean every ten seconds."""
    bins = moments.histories.reshape(-1, BINS, BIN_SECONDS)
    pairs = np.stack([bins.max(axis=2), bins.mean(axis=2)], axis=2)
    rebuilt = np.stack([seconds_of_bins(row) for row in pairs])
    return smape(forecast_quantiles(weights, rebuilt)[:, 0], moments.peaks)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print tables and the outcome; 0 when every bar holds, 1 when one does not, 2 for a trace that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forecast", description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--fit", type=Path, help="another trace to fit AR(12) on")
    parser.add_argument("--weights", type=Path, default=SHIPPED_WEIGHTS)
    parser.add_argument("--rps-per-core", type=float, default=30.0, help="to count idle cores with")
    given = parser.parse_args(arguments)
    try:
        whole = read_trace(given.trace).rps
        learned, held_back = (read_trace(given.fit).rps, whole) if given.fit else split(whole)
    except TraceError as error:
        parser.error(str(error))
    weights = LstmWeights.load(given.weights)
    outcome = _measure(whole, learned, held_back, weights, given.rps_per_core)
    outcome.print()
    return 0 if outcome.holds else 1


def _measure(whole: Load, learned: Load, held_back: Load, weights: LstmWeights, rps_per_core: float) -> Outcome:
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
    figures["smape_lstm_on_rebuilt_seconds"] = round(rebuilt_error(moments, weights), 5)
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
        for name in (SERVED, "LSTM", "AR(12)", "reactive")
    }
    worst = max(shapes, key=lambda shape: _excess(shapes[shape]))
    figures["worst_shape_against_reactive"] = worst
    bars = (
        bar("LSTM SMAPE over AR(12)'s", round(errors["LSTM"] / errors["AR(12)"], 4), "<=", LSTM_OVER_AR),
        bar("SMAPE as served above reactive's, worst shape", round(_excess(shapes[worst]), 5), "<=", 0.0),
        bar("forecast p99 seconds", round(prediction_seconds(weights), 5), "<=", 0.005),
    )
    return Outcome(name="bench-forecast", figures=figures, bars=bars)


_SHOWN = (SERVED, "LSTM", "AR(12)", "reactive", "last-max")


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
        table.add_row(shape, *(f"{row[name]:.2%}" for name in _SHOWN), f"{ratio:.2f}")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
