"""The trained forecaster: two minutes of load in, quantiles of the peak of the next 20 seconds out.

An LSTM (of 48 units, not 25) and a dense layer (IPA §3), with four changes. What it sees is relative to the window's
mean and deviation, so that one set of weights serves any load: ten times the history, ten times the forecast.
What it says is a correction to the peak of the last 20 seconds, in deviations of the window: on a load without noise
it is the reactive forecast, and it leaves that only as far as the load itself varies. Each of the 12 bins of 10 s gives
five figures in place of its maximum alone, which by itself is mostly noise. And the dense layer gives three quantiles,
trained by the pinball loss, so that a plan can ask for the median or for more.

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

from trimtab_predictor.forecaster import HORIZON_SECONDS, Forecast, checked_history, reactive

HISTORY_SECONDS = 120
BIN_SECONDS = 10
BINS = HISTORY_SECONDS // BIN_SECONDS
FEATURES = 6
UNITS = 48
QUANTILES = (0.5, 0.9, 0.99)
MAX_MISSING_SECONDS = 24  # a fifth of the window, interpolated
LEAST_SPREAD = 1e-9  # below it, seconds differ by rounding only
LEAST_RATIO = 0.05  # of the window's mean: no peak is forecast below
MOST_DEVIATIONS = 8.0
MAX_RISE = 4.0  # a forecast beyond so many times the window's own peak is no knowledge but extrapolation
SHIPPED_WEIGHTS = Path(__file__).with_name("weights") / "lstm.npz"

_SHAPES = {
    "kernel": (FEATURES, 4 * UNITS),
    "recurrent_kernel": (UNITS, 4 * UNITS),
    "bias": (4 * UNITS,),
    "dense_kernel": (UNITS, len(QUANTILES)),
    "dense_bias": (len(QUANTILES),),
}
_CURE = "train them anew with: python -m trimtab_predictor.train"


class WeightsError(Exception):
    """Weights that cannot be used; the message names the file and how to make it anew."""


@dataclass(frozen=True, slots=True, eq=False)
class LstmWeights:
    """Weights in Keras' layout: the four gates input, forget, cell, output side by side; F features, H units.

    Attributes:
        kernel: [F, 4H].
        recurrent_kernel: [H, 4H].
        bias: [4H].
        dense_kernel: [H, Q], a column for each of QUANTILES.
        dense_bias: [Q].
    """

    kernel: NDArray[np.float64]
    recurrent_kernel: NDArray[np.float64]
    bias: NDArray[np.float64]
    dense_kernel: NDArray[np.float64]
    dense_bias: NDArray[np.float64]

    @classmethod
    def load(cls, path: Path = SHIPPED_WEIGHTS) -> Self:
        """Read weights from a file; raises WeightsError where it is missing, damaged, or of another network."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise WeightsError(f"forecaster weights {path} cannot be read ({error}); {_CURE}") from error
        return cls.parse(content, str(path))

    @classmethod
    def parse(cls, content: bytes, where: str) -> Self:
        """Read weights from bytes; nothing in them is executed.

        Raises:
            WeightsError: they are damaged, or of another network; the message names `where` they came from.
        """
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                read = {name: np.asarray(arrays[name], dtype=np.float64) for name in _SHAPES}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise WeightsError(f"forecaster weights {where} cannot be read ({error}); {_CURE}") from error
        for name, shape in _SHAPES.items():
            if read[name].shape != shape or not np.isfinite(read[name]).all():
                raise WeightsError(
                    f"forecaster weights {where}: {name} must be {shape} finite numbers, is {read[name].shape}; {_CURE}"
                )
        return cls(**read)

    def to_bytes(self) -> bytes:
        """Return the file `load` reads: float32, no pickle, the same bytes for the same weights."""
        buffer = io.BytesIO()
        arrays = {field.name: getattr(self, field.name).astype(np.float32) for field in fields(self)}
        np.savez(buffer, allow_pickle=False, **arrays)
        return buffer.getvalue()


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """Windows as the network sees them, and what turns its answer back into requests per second; N windows.

    Attributes:
        inputs: [N, 12, 6].
        means: [N], requests per second.
        spreads: [N], standard deviation over mean; 0 where every second was alike.
        peaks: [N], the peak of the last 20 seconds, in deviations above the mean; 0 where there are none.
    """

    inputs: NDArray[np.float64]
    means: NDArray[np.float64]
    spreads: NDArray[np.float64]
    peaks: NDArray[np.float64]


def describe(windows_rps: NDArray[np.float64]) -> Described:
    """Describe windows of load [N, 120], no NaN, relative to their own means and deviations.

    Six figures a bin: maximum, mean, mean + deviation, maximum and mean of its newer half, each in deviations of
    the window from its mean; and how large that deviation is, on a logarithmic scale.
    """
    means, deviations = windows_rps.mean(axis=1), windows_rps.std(axis=1)
    varies = deviations > LEAST_SPREAD * means
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
    shown = np.clip(relative(np.stack(figures, axis=2)), -MOST_DEVIATIONS, MOST_DEVIATIONS)
    inputs = np.concatenate([shown, np.broadcast_to(size[:, None, None], (*level.shape, 1))], axis=2)
    return Described(inputs, means, spreads, relative(windows_rps[:, -HORIZON_SECONDS:].max(axis=1)))


def evaluate_network(weights: LstmWeights, inputs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Run the LSTM over inputs [N, T, F] and the dense layer over its last state; return [N, Q]."""
    hidden = cell = np.zeros((inputs.shape[0], weights.recurrent_kernel.shape[0]))
    for step in range(inputs.shape[1]):
        gates = inputs[:, step] @ weights.kernel + hidden @ weights.recurrent_kernel + weights.bias
        admit, keep, candidate, emit = np.split(gates, 4, axis=1)
        cell = _sigmoid(keep) * cell + _sigmoid(admit) * np.tanh(candidate)
        hidden = _sigmoid(emit) * np.tanh(cell)
    corrections: NDArray[np.float64] = hidden @ weights.dense_kernel + weights.dense_bias
    return corrections


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 0.5 * (1.0 + np.tanh(0.5 * x))  # unlike 1 / (1 + e^-x) it cannot overflow


def forecast_quantiles(weights: LstmWeights, windows_rps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Forecast the peak of the 20 s after each window [N, 120]; [N, Q], ascending, 0 for windows without load."""
    seen = describe(windows_rps)
    corrections = np.sort(evaluate_network(weights, seen.inputs), axis=1)
    ratios = np.maximum(1 + seen.spreads[:, None] * (seen.peaks[:, None] + corrections), LEAST_RATIO)
    bounded: NDArray[np.float64] = np.minimum(seen.means[:, None] * ratios, MAX_RISE * windows_rps.max(axis=1)[:, None])
    return bounded


def forecast_peaks(weights: LstmWeights, windows_rps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Forecast the median peak of the 20 s after each window [N, 120]; [N]."""
    return forecast_quantiles(weights, windows_rps)[:, 0]


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
        levels = [float(peak) for peak in forecast_quantiles(self._weights, window[None])[0]]
        return Forecast(levels[0], "lstm", "asked for", quantiles=tuple(zip(QUANTILES, levels, strict=True)))


def _interpolated(window: NDArray[np.float64]) -> NDArray[np.float64]:
    observed = np.flatnonzero(np.isfinite(window))
    return np.interp(np.arange(window.size), observed, window[observed])
