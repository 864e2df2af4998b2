"""Trains the LSTM on a recorded load and writes its weights with their measured accuracy.

    python -m trimtab_predictor.train --trace FILE -o FOLDER

The last days are held back: they are scored, never learned from. Half of what is learned is the trace itself, the rest
the same days as smaller and larger services would have seen them, and drawn slopes and waves. The loss is the mean
absolute error of log peaks, whose optimum is the median and which for small errors is the SMAPE.

Files are replaced in one step at the very end, so a trainer killed at any moment leaves the old weights as they were.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab_pipelines.documents import write_atomically
from trimtab_predictor.evaluate import FACTORS, errors_by_factor, outcome, split
from trimtab_predictor.lstm import BINS, FEATURES, UNITS, LstmWeights, features
from trimtab_predictor.trace import TraceError, read_trace
from trimtab_predictor.windows import WINDOW_SECONDS, Windows, cut_windows, drawn_shapes, thickened, thinned

SEED = 7
EPOCHS = 14
BATCH_SIZE = 1024
FIRST_LEARNING_RATE = 6e-3
STRIDE_SECONDS = 1
AUGMENTED_STRIDE_SECONDS = 12
SHAPES_STRIDE_SECONDS = 4
PIECE_SECONDS = 86_400
THINNING_FACTORS = (2, 4, 8, 16, 30)
THICKENING_FACTORS = (4, 16)
FEWEST_WINDOWS = 2_000

Pairs = tuple[NDArray[np.float32], NDArray[np.float32]]


def learning_pairs(rps: NDArray[np.float64], rng: np.random.Generator) -> Pairs:
    """Return what the network learns from a load: itself, thinned, thickened, and drawn shapes a tenth its length."""
    loads = [(rps, STRIDE_SECONDS)]
    loads += [(thinned(rps, factor, rng), AUGMENTED_STRIDE_SECONDS) for factor in THINNING_FACTORS]
    loads += [(thickened(rps, factor, rng), AUGMENTED_STRIDE_SECONDS) for factor in THICKENING_FACTORS]
    loads.append((drawn_shapes(rps.size // 10, rng), SHAPES_STRIDE_SECONDS))
    parts = [_pairs(windows) for load, stride in loads for windows in _in_pieces(load, stride)]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def _in_pieces(rps: NDArray[np.float64], stride_seconds: int) -> Iterator[Windows]:
    """Cut all windows, a day's worth at a time: all at once they would fill a gigabyte."""
    for start in range(0, rps.size, PIECE_SECONDS):
        yield cut_windows(rps[start : start + PIECE_SECONDS + WINDOW_SECONDS - stride_seconds], stride_seconds)


def _pairs(windows: Windows) -> Pairs:
    """Return inputs [N, 12, 5] and targets [N], the log of peak over window mean; windows without load left out."""
    inputs, means = features(windows.histories_rps)
    known = (means > 0) & (windows.peaks_rps > 0)
    return inputs[known].astype(np.float32), np.log(windows.peaks_rps[known] / means[known]).astype(np.float32)


def build_network(steps: int) -> Any:
    """Return the Keras model, compiled; `steps` is how many batches the learning rate falls over."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras  # noqa: PLC0415 - takes ten seconds, and only training needs it

    keras.utils.set_random_seed(SEED)
    network = keras.Sequential(
        [keras.layers.Input((BINS, FEATURES)), keras.layers.LSTM(UNITS, unroll=True), keras.layers.Dense(1)]
    )
    rate = keras.optimizers.schedules.CosineDecay(FIRST_LEARNING_RATE, max(steps, 1))
    network.compile(optimizer=keras.optimizers.Adam(rate), loss="mae")
    return network


def weights_of(network: Any) -> LstmWeights:
    """Take the weights out of the Keras model."""
    return LstmWeights(*(np.asarray(array, dtype=np.float64) for array in network.get_weights()))


def train(rps: NDArray[np.float64], epochs: int) -> LstmWeights:
    """Train on a load [S], printing a line an epoch.

    Raises:
        TraceError: too few windows without a gap to learn from.
    """
    rng = np.random.default_rng(SEED)
    inputs, targets = learning_pairs(rps, rng)
    if len(targets) < FEWEST_WINDOWS:
        raise TraceError(
            f"only {len(targets)} windows of 140 s without a gap to learn from; at least {FEWEST_WINDOWS} are needed"
        )
    network = build_network(epochs * len(targets) // BATCH_SIZE)
    for epoch in range(1, epochs + 1):
        started = time.perf_counter()
        order = rng.permutation(len(targets))
        fitted = network.fit(inputs[order], targets[order], batch_size=BATCH_SIZE, verbose=0, shuffle=False)
        took = time.perf_counter() - started
        _say(f"epoch {epoch} of {epochs}: error of log peak {fitted.history['loss'][0]:.4f}, {took:.1f} s")
    return weights_of(network)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, score the held-back end, write both files; 0 on success, 2 for a trace that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m trimtab_predictor.train", description=__doc__)
    parser.add_argument("--trace", type=Path, required=True, help="requests per second, .csv or .csv.gz, 0 = missing")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="folder for lstm.npz and forecast_accuracy.json"
    )
    parser.add_argument("--epochs", type=int, default=EPOCHS, choices=range(1, 1001), metavar="1..1000")
    given = parser.parse_args(arguments)
    try:
        learned, held_back = split(read_trace(given.trace).rps)
        weights = train(learned, given.epochs)
        table = errors_by_factor(learned, held_back, weights, FACTORS)
    except TraceError as error:
        parser.error(str(error))
    result = outcome("train-predictor", table)
    accuracy = {
        "trace": given.trace.name,
        "held_back_seconds": held_back.size,
        "smape_by_load_divisor": {
            f"{factor:g}": {"windows": windows} | {source: round(error, 5) for source, error in row.items()}
            for factor, (windows, row) in table.items()
        },
    }
    given.output.mkdir(parents=True, exist_ok=True)
    replace_file(given.output / "lstm.npz", weights.to_bytes())
    write_atomically(given.output / "forecast_accuracy.json", json.dumps(accuracy, indent=2) + "\n")
    result.print()
    return 0


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file in one step; a half-written one never bears its name."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)


if __name__ == "__main__":
    raise SystemExit(main())
