"""Training of the LSTM on a recorded load; writes its weights with their measured accuracy.

    python -m trimtab_predictor.train --trace FILE -o FOLDER

The last days are held back for scoring. Half of the training data is the trace itself, the rest the same days as
smaller and larger services would have seen them, and synthetic slopes and waves. The loss is the pinball loss of log
peaks; that of the median is the mean absolute error, which for small errors is the SMAPE.

Files are replaced atomically at the end, so an interrupted run leaves the old weights.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.documents import write_atomically
from trimtab_pipelines.result_line import ResultLine, threshold
from trimtab_predictor.features import BINS, FEATURES, MIN_RATIO, window_features
from trimtab_predictor.forecaster import HORIZON_SECONDS, smape
from trimtab_predictor.lstm import QUANTILES, UNITS, LstmWeights, forecast_peaks
from trimtab_predictor.trace import TraceError, read_trace
from trimtab_predictor.windows import (
    WINDOW_SECONDS,
    Windows,
    clock_jumps,
    cut_windows,
    hold_back,
    scaled_load,
    synthetic_load,
    thicken,
    thin,
)

SEED = 7
EPOCHS = 12
BATCH_SIZE = 1024
FIRST_LEARNING_RATE = 6e-3
TUNING_LEARNING_RATE = 1e-3
MAX_TUNING_STEPS = 20_000
"""Some minutes on two cores, however long the history is."""
STRIDE_SECONDS, STARTED_STRIDE_SECONDS = 3, 4
CHANGED_STRIDE_SECONDS, STARTED_CHANGED_STRIDE_SECONDS = 50, 120
SYNTHETIC_STRIDE_SECONDS = 3
MAX_TUNING_WINDOWS = 300_000
"""Of longer histories every second, third, … window is used, so that memory does not grow with them."""
DAY_SECONDS, STARTED_SECONDS = 86_400, 300
THINNING_FACTORS = (2, 4, 8, 16, 30, 100, 200)
THICKENING_FACTORS = (4, 16, 80)
QUANTILE_WEIGHTS = (1.0, 0.3, 0.15)
"""Most plans use the median."""
CALM_WEIGHT = 0.5
"""Losses grow with the noise of a load; this power of it is divided out, so that calm loads count."""
MIN_WINDOWS = 2_000
MAX_HELD_BACK_SECONDS = 3 * DAY_SECONDS
SCORED_STRIDE_SECONDS = 10
SCORED_DIVISORS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)

Pairs = tuple[NDArray[np.float32], NDArray[np.float32]]


def learning_pairs(rps: NDArray[np.float64], rng: np.random.Generator) -> Pairs:
    """Training data from a load: itself, thinned, thickened, and synthetic load of the same length.

    Thinned and thickened loads get jumps at the marks of other clocks; thinned ones also come as clients that send
    several requests at once. The loads are cut as seen by a service that runs for a day, and by one that started
    minutes ago.
    """
    cuts = [(rps, STRIDE_SECONDS, DAY_SECONDS), (rps, STARTED_STRIDE_SECONDS, STARTED_SECONDS)]
    for change, factors in ((thin, THINNING_FACTORS), (thicken, THICKENING_FACTORS)):
        for factor in factors:
            load = change(np.floor(rps * clock_jumps(rps.size, rng)), factor, rng)
            cuts.append((load, CHANGED_STRIDE_SECONDS, DAY_SECONDS))
            cuts.append((load, STARTED_CHANGED_STRIDE_SECONDS, STARTED_SECONDS))
            if change is thin:  # fewer clients, each of whom sends so many requests at once
                cuts.append((load * factor, CHANGED_STRIDE_SECONDS, DAY_SECONDS))
    cuts.append((synthetic_load(rps.size, rng), SYNTHETIC_STRIDE_SECONDS, DAY_SECONDS))
    return _concatenate([_pairs(windows) for cut in cuts for windows in _windows_by_day(*cut)])


def _windows_by_day(
    rps: NDArray[np.float64], stride_seconds: int, part_seconds: int = DAY_SECONDS
) -> Iterator[Windows]:
    """Cut windows part by part, each as if the history began with it; all at once would fill a gigabyte."""
    for start in range(0, rps.size, part_seconds):
        yield cut_windows(rps[start : start + part_seconds + WINDOW_SECONDS - stride_seconds], stride_seconds)


def _pairs(windows: Windows) -> Pairs:
    """Inputs [N, 12, 16] and targets [N, 3]: log of peak over window mean, spread and reactive peak.

    The loss needs the latter two to convert the network's correction into a peak. Windows without load are left out.
    """
    seen = window_features(windows.histories_rps, windows.context)
    known = (seen.means > 0) & (windows.peaks_rps > 0)
    logs = np.log(windows.peaks_rps[known] / seen.means[known])
    targets = np.stack([logs, seen.spreads[known], seen.peaks[known]], axis=1)
    return seen.inputs[known].astype(np.float32), targets.astype(np.float32)


def _concatenate(parts: Sequence[Pairs]) -> Pairs:
    return np.concatenate([inputs for inputs, _ in parts]), np.concatenate([targets for _, targets in parts])


def build_network(steps: int, learning_rate: float = FIRST_LEARNING_RATE) -> Any:
    """The compiled Keras model, at first the reactive forecast; its learning rate falls over `steps` batches."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras  # noqa: PLC0415 - takes ten seconds, and only training needs it

    def pinball(targets: Any, corrections: Any) -> Any:
        logs, spreads, reactive = targets[:, 0:1], targets[:, 1:2], targets[:, 2:3]
        ratios = keras.ops.maximum(1 + spreads * (reactive + corrections), MIN_RATIO)
        above = logs - keras.ops.log(ratios)
        quantiles = keras.ops.convert_to_tensor([QUANTILES])
        losses = keras.ops.maximum(quantiles * above, (quantiles - 1) * above)
        calm = keras.ops.power(keras.ops.maximum(spreads[:, 0], 1e-3), -CALM_WEIGHT)
        return calm * keras.ops.sum(losses * keras.ops.convert_to_tensor([QUANTILE_WEIGHTS]), axis=1)

    keras.utils.set_random_seed(SEED)
    dense = keras.layers.Dense(len(QUANTILES), kernel_initializer="zeros")
    network = keras.Sequential([keras.layers.Input((BINS, FEATURES)), keras.layers.LSTM(UNITS, unroll=True), dense])
    rate = keras.optimizers.schedules.CosineDecay(learning_rate, max(steps, 1))
    network.compile(optimizer=keras.optimizers.Adam(rate), loss=pinball)
    return network


def extract_weights(network: Any) -> LstmWeights:
    return LstmWeights(*(np.asarray(array, dtype=np.float64) for array in network.get_weights()))


def train(rps: NDArray[np.float64], epochs: int) -> LstmWeights:
    """Train on a load [S], printing a line per epoch. Raises TraceError if too few windows have no gap."""
    rng = np.random.default_rng(SEED)
    return _fit(learning_pairs(rps, rng), epochs, rng)


def fine_tune(weights: LstmWeights, loads: Sequence[NDArray[np.float64]], epochs: int) -> LstmWeights:
    """Continue training on loads [S] of several pipelines, and on synthetic load against forgetting."""
    rng = np.random.default_rng(SEED)
    seconds = sum(load.size for load in loads)
    stride_seconds = max(1, math.ceil(seconds / MAX_TUNING_WINDOWS))
    parts = [_pairs(one) for load in loads for one in _windows_by_day(load, stride_seconds)]
    shapes = synthetic_load(max(min(seconds, MAX_TUNING_WINDOWS) // 2, MIN_WINDOWS), rng)
    known = sum(len(targets) for _, targets in parts)
    parts += map(_pairs, _windows_by_day(shapes, SYNTHETIC_STRIDE_SECONDS))
    return _fit(_concatenate(parts), epochs, rng, known, weights)


def _fit(
    pairs: Pairs, epochs: int, rng: np.random.Generator, known: int | None = None, weights: LstmWeights | None = None
) -> LstmWeights:
    """Train a new network, or continue from weights; raise TraceError if there are too few (`known`) windows."""
    inputs, targets = pairs
    windows = len(targets) if known is None else known
    if windows < MIN_WINDOWS:
        gapless = f"windows of {WINDOW_SECONDS} s with load and without a gap to learn from"
        raise TraceError(f"only {windows} {gapless}; at least {MIN_WINDOWS} are needed")
    if weights is None:
        network = build_network(epochs * len(targets) // BATCH_SIZE)
    else:
        epochs = min(epochs, max(1, MAX_TUNING_STEPS * BATCH_SIZE // len(targets)))
        network = build_network(epochs * len(targets) // BATCH_SIZE, TUNING_LEARNING_RATE)
        network.set_weights([getattr(weights, field.name) for field in fields(weights)])
    for epoch in range(1, epochs + 1):
        started = time.perf_counter()
        order = rng.permutation(len(targets))
        fitted = network.fit(inputs[order], targets[order], batch_size=BATCH_SIZE, verbose=0, shuffle=False)
        loss, took = fitted.history["loss"][0], time.perf_counter() - started
        sys.stdout.write(f"epoch {epoch} of {epochs}: error of log peak {loss:.4f}, {took:.1f} s\n")
        sys.stdout.flush()
    return extract_weights(network)


def forecast_errors(weights: LstmWeights, windows: Windows) -> tuple[float, float]:
    """The SMAPE of the network's median and of the reactive forecast. Raises TraceError if there is no window."""
    if not len(windows):
        raise TraceError(f"no {WINDOW_SECONDS} s without a gap to score the forecasts on")
    reactive = windows.histories_rps[:, -HORIZON_SECONDS:].max(axis=1)
    forecasts = forecast_peaks(weights, windows.histories_rps, windows.context), reactive
    lstm_error, reactive_error = (smape(forecast, windows.peaks_rps) for forecast in forecasts)
    return lstm_error, reactive_error


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, score the held-back end, write both files; 0 on success, 2 for an invalid trace."""
    parser = argparse.ArgumentParser(prog="python -m trimtab_predictor.train", description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="requests per second, .csv or .csv.gz, 0 = missing")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="folder for lstm.npz and forecast_accuracy.json"
    )
    parser.add_argument("--epochs", type=int, default=EPOCHS, choices=range(1, 1001), metavar="1..1000")
    options = parser.parse_args(arguments)
    try:
        training, held_back = hold_back(read_trace(options.trace).rps, MAX_HELD_BACK_SECONDS)
        weights = train(training, options.epochs)
        scored = {n: cut_windows(scaled_load(held_back, n), SCORED_STRIDE_SECONDS) for n in SCORED_DIVISORS}
        errors = {divisor: forecast_errors(weights, windows) for divisor, windows in scored.items()}
    except TraceError as error:
        parser.error(str(error))
    accuracy = {
        "trace": options.trace.name,
        "held_back_seconds": held_back.size,
        "smape_by_load_divisor": {
            f"{divisor:g}": {"windows": len(scored[divisor]), "lstm": round(lstm, 5), "reactive": round(reactive, 5)}
            for divisor, (lstm, reactive) in errors.items()
        },
    }
    worst = max(lstm / reactive if reactive else 2.0 for lstm, reactive in errors.values())
    bar = threshold("LSTM SMAPE over reactive's, worst divisor", round(worst, 4), "<=", 1.0)
    options.output.mkdir(parents=True, exist_ok=True)
    write_atomically(options.output / "lstm.npz", weights.to_bytes())
    write_atomically(options.output / "forecast_accuracy.json", json.dumps(accuracy, indent=2) + "\n")
    figures: dict[str, float | int | str | None] = {
        f"lstm_smape_at_1_{divisor:g}": round(lstm, 5) for divisor, (lstm, _) in errors.items()
    }
    ResultLine(name="train-predictor", figures=figures, bars=(bar,)).print()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
