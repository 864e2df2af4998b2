"""Forecaster interface, the error measure, and the two forecasters that need no training.

All forecast the peak requests per second over the next 20 seconds, so that experiments and the adapter exchange
forecasters by one line.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trimtab_predictor.trace import MAX_RPS, Trace

HORIZON_SECONDS = 20
REACTIVE_ROOTS = ((0.5, 0.0), (0.9, 1.15), (0.99, 3.3))
"""Quantiles of (next peak − last peak) / √last peak over eleven days of recorded load; Poisson alone: 0, 0.94, 1.79."""
Source = Literal["lstm", "reactive", "oracle"]


class HistoryError(ValueError):
    """An invalid load history; the message names the second and the valid range."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The peak load expected over the horizon."""

    peak_rps: float
    """Requests in the busiest second to come, at least 0."""
    source: Source
    reason: str
    """Why this source was used."""
    recent_error: float | None = None
    """SMAPE of the source's recent forecasts, 0 to 2; None before the first."""
    is_measured: bool = True
    """False if no second of the history was observed: missing metrics are not zero load.

    `peak_rps` then repeats the last forecast (0 without one) and must not change a plan.
    """
    quantiles: tuple[tuple[float, float], ...] = ()
    """(probability that the peak stays below, requests per second), ascending; empty if only `peak_rps` is known."""

    def at(self, quantile: float) -> float:
        """The peak that is not exceeded with this probability, interpolated between the known quantiles."""
        if not self.quantiles:
            return self.peak_rps
        probabilities, levels = zip(*self.quantiles, strict=True)
        return float(np.interp(quantile, probabilities, levels))


class Forecaster(Protocol):
    """A source of load forecasts."""

    def forecast(self, history_rps: ArrayLike, now_seconds: float) -> Forecast:
        """Forecast the peak of the next 20 seconds from the requests in each of the last S whole seconds [S].

        The newest is last, and ended at `now_seconds` on any steady clock; NaN if not measured. Raises HistoryError if
        the history is not one row of numbers from 0 to 10^9.
        """
        ...


def check_history(history_rps: ArrayLike) -> NDArray[np.float64]:
    """The history as an array; raise HistoryError if it is invalid."""
    try:
        history = np.asarray(history_rps, dtype=np.float64)
    except (TypeError, ValueError):
        message = "the load history is not a row of numbers; give requests per second, NaN if missing"
        raise HistoryError(message) from None
    if history.ndim != 1:
        raise HistoryError(f"the load history has shape {history.shape}; give one row, [seconds]")
    wrong = np.flatnonzero((history < 0) | (history > MAX_RPS))
    if wrong.size:
        held = f"{history[wrong[0]]:g} requests in the second {history.size - int(wrong[0])} s ago"
        raise HistoryError(f"the load history holds {held}; 0 to {MAX_RPS:g}, or NaN if not measured, are valid")
    return history


def smape(forecast_rps: ArrayLike, actual_rps: ArrayLike) -> float:
    """The symmetric mean absolute percentage error as a fraction, 0 (perfect) to 2.

    mean over i of 2·|f_i − a_i| / (|f_i| + |a_i|), pair by pair; a pair of zeros counts as 0. Raises ValueError if the
    shapes differ (numpy would silently compare all pairs), or there is nothing to compare.
    """
    forecast, actual = np.asarray(forecast_rps, np.float64), np.asarray(actual_rps, np.float64)
    if forecast.shape != actual.shape or forecast.ndim != 1 or not forecast.size:
        raise ValueError(f"SMAPE needs two equally long rows, not shapes {forecast.shape} and {actual.shape}")
    size = np.abs(forecast) + np.abs(actual)
    return float(np.mean(2 * np.abs(forecast - actual) / np.where(size > 0, size, 1.0)))


class ReactiveForecaster:
    """Repeats the peak of the last 20 seconds.

    Past and horizon have the same length: on a constant load both peaks then have the same distribution, whereas the
    peak of a shorter past lies below that of a longer future.
    """

    def __init__(self, reason: str = "asked for") -> None:
        self._reason = reason

    def forecast(self, history_rps: ArrayLike, now_seconds: float) -> Forecast:  # noqa: ARG002 - the shared signature
        """The peak of the newest 20 seconds; if all of these are missing, of the newest 20 observed."""
        return reactive(check_history(history_rps), self._reason)


def reactive(history: NDArray[np.float64], reason: str) -> Forecast:
    newest = history[-HORIZON_SECONDS:]
    if np.isfinite(newest).any():
        peak = float(np.nanmax(newest))
        return Forecast(peak, "reactive", reason, quantiles=_peak_quantiles(peak))
    observed = np.flatnonzero(np.isfinite(history))
    if not observed.size:
        where = f"in the last {history.size} s" if history.size else "yet"
        return Forecast(0.0, "reactive", f"no load measured {where}", is_measured=False)
    age = history.size - 1 - int(observed[-1])
    peak = float(history[observed[-HORIZON_SECONDS:]].max())
    return Forecast(peak, "reactive", f"the newest measured second is {age} s old", quantiles=_peak_quantiles(peak))


def _peak_quantiles(peak_rps: float) -> tuple[tuple[float, float], ...]:
    """Quantiles of the next peak: arrivals vary by the root of their number."""
    return tuple((quantile, peak_rps + roots * peak_rps**0.5) for quantile, roots in REACTIVE_ROOTS)


class OracleForecaster:
    """Knows the trace being played: the upper bound of any forecaster."""

    def __init__(self, trace: Trace, offset_seconds: float = 0.0) -> None:
        """Take the trace as played (sped up and scaled alike); trace second = now_seconds + offset_seconds."""
        self._trace = trace
        self._offset_seconds = offset_seconds

    def forecast(self, history_rps: ArrayLike, now_seconds: float) -> Forecast:
        """The true peak of the next 20 seconds; reactive where the trace does not know them."""
        history = check_history(history_rps)
        second = round(now_seconds + self._offset_seconds)
        ahead = self._trace.rps[max(second, 0) : max(second + HORIZON_SECONDS, 0)]
        if not np.isfinite(ahead).any():
            end = len(self._trace)
            return reactive(history, f"{self._trace.name} has no load at second {second} of its {end}")
        return Forecast(float(np.nanmax(ahead)), "oracle", f"read from {self._trace.name}")
