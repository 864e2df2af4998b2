"""The trained forecaster: two minutes of load in, the peak of the next 20 seconds out.

An LSTM of 25 units and a dense layer (IPA §3), with three changes. Its input is relative to the window's own mean
and its output a ratio to it, so that one set of weights serves any load: ten times the history gives ten times the
forecast. Each of the 12 bins of 10 s gives five figures in place of its maximum alone: a maximum by itself is mostly
noise. And it is trained on loads thinned down to a few requests per second, where noise is large, too.

Keras trains the weights; here a few lines of numpy evaluate them, because importing TensorFlow takes ten seconds and
400 MB in a process that forecasts once every ten seconds.
"""

import io
import zipfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trimtab_predictor.forecaster import Forecast, checked_history, reactive

HISTORY_SECONDS = 120
BIN_SECONDS = 10
BINS = HISTORY_SECONDS // BIN_SECONDS
FEATURES = 5
UNITS = 25
MAX_MISSING_SECONDS = 24  # a fifth of the window, interpolated
MAX_RISE = 4.0  # a forecast beyond so many times the window's own peak is no knowledge but extrapolation
SHIPPED_WEIGHTS = Path(__file__).with_name("weights") / "lstm.npz"

_SHAPES = {
    "kernel": (FEATURES, 4 * UNITS),
    "recurrent_kernel": (UNITS, 4 * UNITS),
    "bias": (4 * UNITS,),
    "dense_kernel": (UNITS, 1),
    "dense_bias": (1,),
}


class WeightsError(Exception):
    """Weights that cannot be used; the message names the file and how to make it anew."""


@dataclass(frozen=True, slots=True, eq=False)
class LstmWeights:
    """Weights in Keras' layout: the four gates input, forget, cell, output side by side; F features, H units.

    Attributes:
        kernel: [F, 4H].
        recurrent_kernel: [H, 4H].
        bias: [4H].
        dense_kernel: [H, 1].
        dense_bias: [1].
    """

    kernel: NDArray[np.float64]
    recurrent_kernel: NDArray[np.float64]
    bias: NDArray[np.float64]
    dense_kernel: NDArray[np.float64]
    dense_bias: NDArray[np.float64]

    @classmethod
    def load(cls, path: Path = SHIPPED_WEIGHTS) -> Self:
        """Read weights; nothing in the file is executed.

        Raises:
            WeightsError: the file is missing, damaged, or of another network.
        """
        cure = "train them anew with: python -m trimtab_predictor.train"
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as arrays:
                read = {name: np.asarray(arrays[name], dtype=np.float64) for name in _SHAPES}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise WeightsError(f"forecaster weights {path} cannot be read ({error}); {cure}") from error
        for name, shape in _SHAPES.items():
            if read[name].shape != shape or not np.isfinite(read[name]).all():
                raise WeightsError(
                    f"forecaster weights {path}: {name} must be {shape} finite numbers, is {read[name].shape}; {cure}"
                )
        return cls(**read)

    def to_bytes(self) -> bytes:
        """Return the file `load` reads: float32, no pickle, the same bytes for the same weights."""
        buffer = io.BytesIO()
        arrays = {field.name: getattr(self, field.name).astype(np.float32) for field in fields(self)}
        np.savez(buffer, allow_pickle=False, **arrays)
        return buffer.getvalue()


def features(windows_rps: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Describe windows of load relative to their own means.

    Args:
        windows_rps: [N, 120], no NaN.

    Returns:
        [N, 12, 5] per bin: maximum, mean, mean + standard deviation, and maximum and mean of its newer half, each
        divided by the window's mean, minus 1; and the means, [N]. A window without load is all -1.
    """
    means = windows_rps.mean(axis=1)
    relative = windows_rps / np.where(means > 0, means, 1.0)[:, None]
    bins = relative.reshape(-1, BINS, BIN_SECONDS)
    newer = bins[:, :, BIN_SECONDS // 2 :]
    level = bins.mean(axis=2)
    described = np.stack(
        [bins.max(axis=2), level, level + bins.std(axis=2), newer.max(axis=2), newer.mean(axis=2)], axis=2
    )
    return described - 1.0, means


def evaluate_network(weights: LstmWeights, inputs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Run the LSTM over inputs [N, T, F] and the dense layer over its last state; return [N]."""
    hidden = cell = np.zeros((inputs.shape[0], weights.recurrent_kernel.shape[0]))
    for step in range(inputs.shape[1]):
        gates = inputs[:, step] @ weights.kernel + hidden @ weights.recurrent_kernel + weights.bias
        admit, keep, candidate, emit = np.split(gates, 4, axis=1)
        cell = _sigmoid(keep) * cell + _sigmoid(admit) * np.tanh(candidate)
        hidden = _sigmoid(emit) * np.tanh(cell)
    return (hidden @ weights.dense_kernel + weights.dense_bias)[:, 0]


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 0.5 * (1.0 + np.tanh(0.5 * x))  # unlike 1 / (1 + e^-x) it cannot overflow


def forecast_peaks(weights: LstmWeights, windows_rps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Forecast the peak of the 20 s after each window [N, 120]; [N], 0 for windows without load."""
    inputs, means = features(windows_rps)
    peaks = means * np.exp(np.minimum(evaluate_network(weights, inputs), np.log(HISTORY_SECONDS * MAX_RISE)))
    bounded: NDArray[np.float64] = np.minimum(peaks, MAX_RISE * windows_rps.max(axis=1))
    return bounded


class LstmForecaster:
    """Forecasts by the network where the history suffices, else reactively, saying what was missing."""

    name = "lstm"

    def __init__(self, weights: LstmWeights) -> None:
        self._weights = weights

    def shortfall(self, history: NDArray[np.float64]) -> str | None:
        """Say what a checked history lacks for the network; None where it suffices."""
        if history.size < HISTORY_SECONDS:
            return f"{history.size} s of history, LSTM needs {HISTORY_SECONDS} s"
        missing = int(np.isnan(history[-HISTORY_SECONDS:]).sum())
        if missing > MAX_MISSING_SECONDS:
            return f"{missing} of the last {HISTORY_SECONDS} s not measured, LSTM can do without {MAX_MISSING_SECONDS}"
        return None

    def forecast(self, history_rps: ArrayLike, now_seconds: float) -> Forecast:  # noqa: ARG002 - the shared signature
        """Return the network's forecast from the newest two minutes."""
        history = checked_history(history_rps)
        shortfall = self.shortfall(history)
        if shortfall is not None:
            return reactive(history, shortfall)
        window = _interpolated(history[-HISTORY_SECONDS:])
        return Forecast(float(forecast_peaks(self._weights, window[None])[0]), "lstm", "asked for")


def _interpolated(window: NDArray[np.float64]) -> NDArray[np.float64]:
    observed = np.flatnonzero(np.isfinite(window))
    return np.interp(np.arange(window.size), observed, window[observed])
