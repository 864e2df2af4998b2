"""Evaluation of forecasters on a trace: the LSTM, reactive, the last 10 seconds and AR(12), on the same windows.

    python -m trimtab_predictor.evaluate --trace FILE [--fit FILE] [--factors 1,8,30]

AR(12) is least squares from the peaks of the twelve 10-second bins (with intercept) to the peak of the next 20 s,
fitted on the earlier part of the trace, or on the one given with --fit: the baseline that an LSTM must beat.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.result_line import ResultLine, threshold
from trimtab_predictor.features import BIN_SECONDS, BINS
from trimtab_predictor.forecaster import HORIZON_SECONDS, smape
from trimtab_predictor.lstm import SHIPPED_WEIGHTS, LstmWeights, forecast_peaks
from trimtab_predictor.trace import TraceError, read_trace
from trimtab_predictor.windows import WINDOW_SECONDS, Windows, cut_windows, thicken, thin

STRIDE_SECONDS = 10
HELD_BACK_SECONDS = 3 * 86_400
FACTORS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
LSTM_OVER_AR = 0.83
MIN_WINDOWS = 20


def split(rps: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Split a trace by time into a training part and a held-back end (three days, at most a quarter)."""
    held_back = min(HELD_BACK_SECONDS, rps.size // 4)
    return rps[:-held_back], rps[-held_back:]


def scaled_load(rps: NDArray[np.float64], factor: float) -> NDArray[np.float64]:
    """Thin by a factor of at least 1, thicken by one below; the same random draw for the same factor."""
    rng = np.random.default_rng(round(factor * 1000))
    return thin(rps, factor, rng) if factor >= 1 else thicken(rps, 1 / factor, rng)


def forecast_errors(fit: Windows, score: Windows, weights: LstmWeights) -> dict[str, float]:
    """The SMAPE of each forecaster over `score`; only AR(12) is fitted on `fit`."""
    actual = score.peaks_rps
    return {
        "lstm": smape(forecast_peaks(weights, score.histories_rps, score.context), actual),
        "reactive": smape(score.histories_rps[:, -HORIZON_SECONDS:].max(axis=1), actual),
        "last10": smape(score.histories_rps[:, -BIN_SECONDS:].max(axis=1), actual),
        "ar12": smape(ar_forecaster(fit)(score.histories_rps), actual),
    }


def forecast_errors_by_factor(
    fit_rps: NDArray[np.float64], score_rps: NDArray[np.float64], weights: LstmWeights, factors: Sequence[float]
) -> dict[float, tuple[int, dict[str, float]]]:
    """For each divisor of the load, the number of windows and each forecaster's SMAPE.

    Raises TraceError if there are too few whole windows.
    """
    table = {}
    for factor in factors:
        fit, score = (cut_windows(scaled_load(part, factor), STRIDE_SECONDS) for part in (fit_rps, score_rps))
        require_enough(fit, score)
        table[factor] = (len(score), forecast_errors(fit, score, weights))
    return table


def require_enough(fit: Windows, score: Windows) -> None:
    """Raise TraceError if there are too few whole windows."""
    if min(len(fit), len(score)) < MIN_WINDOWS:
        raise TraceError(
            f"only {len(fit)} windows to fit AR(12) and {len(score)} to score; at least {MIN_WINDOWS} of "
            f"{WINDOW_SECONDS} seconds without a gap are needed in each part"
        )


def result_line(name: str, table: Mapping[float, tuple[int, Mapping[str, float]]]) -> ResultLine:
    """Summarise the table against two bars: 0.83 × AR(12) on the trace itself, and reactive at every factor."""
    figures: dict[str, float | int | str | None] = {}
    bars = []
    for factor, (windows, row) in table.items():
        figures[f"windows_at_1_{factor:g}"] = windows
        figures |= {f"{source}_smape_at_1_{factor:g}": round(error, 5) for source, error in row.items()}
        if factor == 1:
            bars.append(threshold("LSTM SMAPE over AR(12)'s", round(row["lstm"] / row["ar12"], 4), "<=", LSTM_OVER_AR))
    worst = max(row["lstm"] / row["reactive"] if row["reactive"] else 2.0 for _, row in table.values())
    bars.append(threshold("LSTM SMAPE over reactive's, worst factor", round(worst, 4), "<=", 1.0))
    return ResultLine(name=name, figures=figures, bars=tuple(bars))


def ar_forecaster(fit: Windows) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """Fit AR(12) and return it as a function of histories [N, 120] that gives peaks [N]."""
    coefficients, *_ = np.linalg.lstsq(_bin_peaks(fit.histories_rps), fit.peaks_rps, rcond=None)
    return lambda histories_rps: np.asarray(_bin_peaks(histories_rps) @ coefficients)


def _bin_peaks(histories_rps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Peak of each bin, and a 1 for the intercept: [N, 13]."""
    peaks = histories_rps.reshape(-1, BINS, BIN_SECONDS).max(axis=2)
    return np.pad(peaks, ((0, 0), (0, 1)), constant_values=1.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the result; 0 if every bar holds, 1 if one does not, 2 for an invalid trace."""
    parser = argparse.ArgumentParser(prog="python -m trimtab_predictor.evaluate", description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="scored: its held-back end, or all of it with --fit")
    parser.add_argument("--fit", type=Path, help="another trace to fit AR(12) on")
    parser.add_argument("--weights", type=Path, default=SHIPPED_WEIGHTS)
    parser.add_argument("--factors", default=",".join(f"{factor:g}" for factor in FACTORS))
    given = parser.parse_args(arguments)
    try:
        factors = [float(factor) for factor in given.factors.split(",")]
    except ValueError:
        parser.error(f"--factors {given.factors}: expected numbers above 0, such as 1,8,30")
    if not all(0 < factor < np.inf for factor in factors):
        parser.error(f"--factors {given.factors}: expected numbers above 0, such as 1,8,30")
    try:
        score = read_trace(given.trace).rps
        fit, score = (read_trace(given.fit).rps, score) if given.fit else split(score)
        table = forecast_errors_by_factor(fit, score, LstmWeights.load(given.weights), factors)
    except TraceError as error:
        parser.error(str(error))
    result = result_line("forecast-accuracy", table)
    result.print()
    return 0 if result.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
