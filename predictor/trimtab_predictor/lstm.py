"""LSTM forecaster: quantiles of the next 20 s's peak from two minutes of load and the context of hours before.

An LSTM (of 48 units, not 25) and a dense layer (IPA §3). Its output is a correction to the peak of the last 20 seconds,
in deviations of the window: on a load without noise it equals the reactive forecast, and it departs from that only as
far as the load itself varies. The dense layer gives three quantiles, trained by the pinball loss, so that a plan can
use the median or a higher one.

Keras trains the weights; a few lines of numpy evaluate them, because importing TensorFlow takes ten seconds and 400 MB
in a process that forecasts once every ten seconds.
"""

import io
import zipfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trimtab_predictor.context import MEMORY_SECONDS, Context, load_context
from trimtab_predictor.features import FEATURES, HISTORY_SECONDS, MIN_RATIO, window_features
from trimtab_predictor.forecaster import HORIZON_SECONDS, Forecast, check_history, reactive

UNITS = 48
QUANTILES = (0.5, 0.9, 0.99)
MAX_MISSING_SECONDS = 24
"""A fifth of the window, interpolated."""
MAX_RISE = 4.0
"""Limit of a forecast as a multiple of the window's peak; beyond it is extrapolation."""
SHIPPED_WEIGHTS = Path(__file__).with_name("weights") / "lstm.npz"

_SHAPES = {
    "kernel": (FEATURES, 4 * UNITS),
    "recurrent_kernel": (UNITS, 4 * UNITS),
    "bias": (4 * UNITS,),
    "dense_kernel": (UNITS, len(QUANTILES)),
    "dense_bias": (len(QUANTILES),),
}
_CURE = "train them again with: python -m trimtab_predictor.train"


class WeightsError(Exception):
    """Invalid weights; the message names the file and how to recreate it."""


@dataclass(frozen=True, slots=True, eq=False)
class LstmWeights:
    """Weights in Keras' layout: the four gates input, forget, cell, output side by side; F features, H units."""

    kernel: NDArray[np.float64]
    """[F, 4H]."""
    recurrent_kernel: NDArray[np.float64]
    """[H, 4H]."""
    bias: NDArray[np.float64]
    """[4H]."""
    dense_kernel: NDArray[np.float64]
    """[H, Q], a column for each of QUANTILES."""
    dense_bias: NDArray[np.float64]
    """[Q]."""

    @classmethod
    def load(cls, path: Path = SHIPPED_WEIGHTS) -> Self:
        """Read weights from a file; raises WeightsError if it is missing, damaged, or of another network."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise WeightsError(f"forecaster weights {path} cannot be read ({error}); {_CURE}") from error
        return cls.parse(content, str(path))

    @classmethod
    def parse(cls, content: bytes, where: str) -> Self:
        """Read weights from the bytes of `where` without executing anything; raise WeightsError if they do not fit."""
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
                read = {name: np.asarray(arrays[name], dtype=np.float64) for name in _SHAPES}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise WeightsError(f"forecaster weights {where} cannot be read ({error}); {_CURE}") from error
        for name, shape in _SHAPES.items():
            if read[name].shape != shape or not np.isfinite(read[name]).all():
                problem = f"{name} must be {shape} finite numbers, is {read[name].shape}"
                raise WeightsError(f"forecaster weights {where}: {problem}; {_CURE}")
        return cls(**read)

    def to_bytes(self) -> bytes:
        """The file content that `load` reads: float32, no pickle, the same bytes for the same weights."""
        buffer = io.BytesIO()
        arrays = {field.name: getattr(self, field.name).astype(np.float32) for field in fields(self)}
        np.savez(buffer, allow_pickle=False, **arrays)
        return buffer.getvalue()


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


def forecast_quantiles(weights: LstmWeights, windows_rps: NDArray[np.float64], context: Context) -> NDArray[np.float64]:
    """Forecast the peak of the 20 s after each window [N, 120]; [N, Q], ascending, 0 for windows without load."""
    seen = window_features(windows_rps, context)
    corrections = np.sort(evaluate_network(weights, seen.inputs), axis=1)
    ratios = np.maximum(1 + seen.spreads[:, None] * (seen.peaks[:, None] + corrections), MIN_RATIO)
    bounded: NDArray[np.float64] = np.minimum(seen.means[:, None] * ratios, MAX_RISE * windows_rps.max(axis=1)[:, None])
    newest = windows_rps[:, -HORIZON_SECONDS:]
    # Random arrivals are never equal for this long: such a load is paced, and its next seconds equal the last.
    is_paced = (newest[:, 0] > 0) & (newest == newest[:, :1]).all(axis=1)
    return np.where(is_paced[:, None], newest[:, :1], bounded)


def forecast_peaks(weights: LstmWeights, windows_rps: NDArray[np.float64], context: Context) -> NDArray[np.float64]:
    """Forecast the median peak of the 20 s after each window [N, 120]; [N]."""
    return forecast_quantiles(weights, windows_rps, context)[:, 0]


class LstmForecaster:
    """Forecasts by the network if the history is sufficient, else reactively with the reason."""

    def __init__(self, weights: LstmWeights) -> None:
        self._weights = weights

    def shortfall(self, history: NDArray[np.float64]) -> str | None:
        """What a checked history lacks for the network; None if it is sufficient."""
        if history.size < HISTORY_SECONDS:
            return f"{history.size} s of history, LSTM needs {HISTORY_SECONDS} s"
        missing = int(np.isnan(history[-HISTORY_SECONDS:]).sum())
        if missing > MAX_MISSING_SECONDS:
            return f"{missing} of the last {HISTORY_SECONDS} s not measured, LSTM can do without {MAX_MISSING_SECONDS}"
        return None

    def forecast(self, history_rps: ArrayLike, now_seconds: float) -> Forecast:  # noqa: ARG002 - the shared signature
        history = check_history(history_rps)
        shortfall = self.shortfall(history)
        if shortfall is not None:
            return reactive(history, shortfall)
        seconds, newest = np.arange(HISTORY_SECONDS), history[-HISTORY_SECONDS:]
        observed = np.isfinite(newest)
        window = np.interp(seconds, seconds[observed], newest[observed])
        remembered = history[-MEMORY_SECONDS:]
        context = load_context(remembered, np.array([remembered.size]))
        levels = [float(peak) for peak in forecast_quantiles(self._weights, window[None], context)[0]]
        return Forecast(levels[0], "lstm", "asked for", quantiles=tuple(zip(QUANTILES, levels, strict=True)))
