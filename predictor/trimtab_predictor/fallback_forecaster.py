"""`FallbackForecaster`: the LSTM with the reactive forecast as its fallback, chosen by their recent errors.

A trained network is better on loads like its training data, and can be arbitrarily wrong on others. Both forecasters
run, both are scored after their 20 seconds, and the network is used only while its recent error does not exceed the
reactive one's by more than chance explains: the worst case is a few minutes of a slightly worse forecast.

Quantiles are checked in the same way: if more of the recent peaks than chance allows exceeded the 90 % quantile, all
quantiles are widened until that share would have been kept (a conformal bound).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trimtab_predictor.forecaster import HORIZON_SECONDS, Forecast, check_history, reactive, smape
from trimtab_predictor.load_history import LoadHistory
from trimtab_predictor.lstm import SHIPPED_WEIGHTS, LstmForecaster, LstmWeights, WeightsError

RECENT_FORECASTS = 30
"""Five minutes of decisions every 10 s: long enough to average noise, short enough to react."""
MIN_FORECASTS = 6
CHECKED_QUANTILE = 0.9
MIN_TO_WIDEN = 20
MIN_DIFFERENCE = 1e-6
"""Smaller differences of errors are rounding."""
MAX_WIDENING = 5.0
MIN_OBSERVED_SECONDS = 15
"""Of the 20: a peak over fewer would favour low forecasts."""


@dataclass(frozen=True, slots=True)
class _ForecastScore:
    """A forecast compared to the peak that came."""

    error: float
    """0 to 2; the mean over many forecasts is the SMAPE."""
    reach: float
    """Distance of the peak above the median, in units of the distance from median to checked quantile."""


class FallbackForecaster:
    """The LSTM while it is at least as good as the reactive forecast, which replaces it otherwise."""

    def __init__(
        self, lstm: LstmForecaster | None, history: LoadHistory | None = None, *, without_lstm: str = "no LSTM given"
    ) -> None:
        """Take the trained forecaster, or None and the reason; and the load history."""
        self._lstm = lstm
        self._without_lstm = without_lstm
        self._history = history or LoadHistory()
        self._pending: deque[tuple[float, Forecast, Forecast | None]] = deque()
        """Time, reactive forecast and LSTM's of moments that have not passed."""
        self._scores: deque[tuple[_ForecastScore, _ForecastScore | None]] = deque(maxlen=RECENT_FORECASTS)
        """Of the same, once they have."""
        self._last: Forecast | None = None

    def forecast(self, history_rps: ArrayLike, now_seconds: float) -> Forecast:
        """Score past forecasts, then return the better source's new one.

        A second call for the same moment is not scored twice. Histories are stored, so the network sees hours although
        each call has only minutes.
        """
        history = check_history(history_rps)
        remembered = self._history.extend(history, now_seconds)
        self._score(history, now_seconds)
        fallback = reactive(history, "")
        if not fallback.is_measured:
            last_peak_rps = self._last.peak_rps if self._last else 0.0
            return replace(fallback, peak_rps=last_peak_rps, recent_error=self._reactive_error())
        lstm, shortfall = self._ask_lstm(remembered, now_seconds)
        if not self._pending or self._pending[-1][0] < now_seconds:
            self._pending.append((now_seconds, fallback, lstm))
        self._last = self._widen(self._choose(fallback, lstm, shortfall))
        return self._last

    def _widen(self, chosen: Forecast) -> Forecast:
        """Widen the quantiles if recent peaks exceeded them more often than chance allows."""
        scores = [lstm if chosen.source == "lstm" else fallback for fallback, lstm in self._scores]
        factor = widening_factor([score.reach for score in scores if score is not None])
        if factor == 1.0:
            return chosen
        stretched = tuple((q, chosen.peak_rps + factor * (rps - chosen.peak_rps)) for q, rps in chosen.quantiles)
        reason = f"{chosen.reason}; quantiles widened by a factor of {factor:.1f}"
        return replace(chosen, quantiles=stretched, reason=reason)

    def _ask_lstm(self, history: NDArray[np.float64], now_seconds: float) -> tuple[Forecast | None, str]:
        if self._lstm is None:
            return None, self._without_lstm
        shortfall = self._lstm.shortfall(history)
        return (None, shortfall) if shortfall else (self._lstm.forecast(history, now_seconds), "")

    def _choose(self, fallback: Forecast, lstm: Forecast | None, shortfall: str) -> Forecast:
        fallback = replace(fallback, recent_error=self._reactive_error())
        if lstm is None:
            return replace(fallback, reason="; ".join(filter(None, (shortfall, fallback.reason))))
        pairs = [(of_lstm.error, of_fallback.error) for of_fallback, of_lstm in self._scores if of_lstm is not None]
        if not pairs:
            return replace(lstm, reason="two minutes of history; no forecast scored yet")
        lstm_error, reactive_error = (float(error) for error in np.mean(pairs, axis=0))
        compared = f"over the last {len(pairs)} forecasts: {lstm_error:.1%} against {reactive_error:.1%}"
        if len(pairs) >= MIN_FORECASTS and lstm_error - reactive_error > _standard_error(pairs) + MIN_DIFFERENCE:
            return replace(fallback, reason=f"LSTM worse than reactive {compared}")
        verdict = "no worse than reactive" if len(pairs) >= MIN_FORECASTS else "too few forecasts to compare LSTM"
        return replace(lstm, reason=f"{verdict} {compared}", recent_error=lstm_error)

    def _reactive_error(self) -> float | None:
        return float(np.mean([score.error for score, _ in self._scores])) if self._scores else None

    def _score(self, history: NDArray[np.float64], now_seconds: float) -> None:
        if self._pending and now_seconds < self._pending[-1][0]:
            self._pending.clear()  # the clock went back, so the forecast seconds are unknown
        while self._pending:
            elapsed = round(now_seconds - self._pending[0][0])
            if elapsed < HORIZON_SECONDS:
                return
            _, fallback, lstm = self._pending.popleft()
            start = history.size - elapsed
            observed = history[max(start, 0) : max(start + HORIZON_SECONDS, 0)]
            if np.isfinite(observed).sum() >= MIN_OBSERVED_SECONDS:
                peak_rps = float(np.nanmax(observed))
                self._scores.append((_score(fallback, peak_rps), None if lstm is None else _score(lstm, peak_rps)))


def widening_factor(reaches: Sequence[float]) -> float:
    """The factor by which to widen quantiles, from how far recent peaks reached; 1 if they held."""
    count = len(reaches)
    if count < MIN_TO_WIDEN:
        return 1.0
    exceeded = sum(reach > 1.0 for reach in reaches)
    tail = 1.0 - CHECKED_QUANTILE
    if exceeded <= count * tail + 2 * (count * tail * CHECKED_QUANTILE) ** 0.5:
        return 1.0
    return min(float(np.quantile(reaches, CHECKED_QUANTILE, method="higher")), MAX_WIDENING)


def _standard_error(pairs: Sequence[tuple[float, float]]) -> float:
    """The standard error of the mean difference of paired errors."""
    differences = np.array([first - second for first, second in pairs])
    return float(differences.std(ddof=1) / np.sqrt(differences.size))


def _score(forecast: Forecast, actual_rps: float) -> _ForecastScore:
    above, distance = actual_rps - forecast.peak_rps, forecast.at(CHECKED_QUANTILE) - forecast.peak_rps
    reach = above / distance if distance > 0 else 0.0 if above <= 0 else MAX_WIDENING
    return _ForecastScore(smape([forecast.peak_rps], [actual_rps]), reach)


def shipped_forecaster(weights: Path = SHIPPED_WEIGHTS, history: LoadHistory | None = None) -> FallbackForecaster:
    """The fallback forecaster with the weights of this package; reactive, with a reason, if they are invalid."""
    try:
        return FallbackForecaster(LstmForecaster(LstmWeights.load(weights)), history)
    except WeightsError as error:
        return FallbackForecaster(None, history, without_lstm=str(error))
