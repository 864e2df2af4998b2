"""Chooses between the LSTM and the reactive forecast by how each has done of late.

A trained network is better on loads like those it saw, and can be wrong without limit on others. So both forecast
side by side, both are scored once their 20 seconds have passed, and the network is believed only while its recent error
is not above the reactive one's by more than chance explains: the worst it can do to a plan is a few minutes of a
slightly worse forecast.

The quantiles are checked in the same way: where more of the recent peaks than chance allows came above the one that
nine in ten should stay below, all are widened until that share would have been kept (a conformal bound).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trimtab_predictor.accuracy import smape
from trimtab_predictor.forecaster import HORIZON_SECONDS, Forecast, check_history, reactive
from trimtab_predictor.load_history import LoadHistory
from trimtab_predictor.lstm import SHIPPED_WEIGHTS, LstmForecaster, LstmWeights, WeightsError

RECENT_FORECASTS = 30
"""Five minutes of decisions every 10 s: long enough to average noise, short enough to notice."""
MIN_FORECASTS = 6
CHECKED_QUANTILE = 0.9
MIN_TO_WIDEN = 20
MIN_DIFFERENCE = 1e-6
"""Of errors; less is rounding."""
MAX_WIDENING = 5.0
MIN_OBSERVED_SECONDS = 15
"""Of the 20: a peak over fewer would flatter whoever forecast low."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """Two forecasts whose time has not come."""

    made_at_seconds: float
    reactive: Forecast
    lstm: Forecast | None


@dataclass(frozen=True, slots=True)
class _ForecastScore:
    """The errors of two forecasts of the same moment, each 0 to 2; their mean over many is the SMAPE.

    `reach` is by how many times the distance from median to checked quantile the peak lay above the median.
    """

    reactive_error: float
    reactive_reach: float
    lstm_error: float | None = None
    lstm_reach: float | None = None


class FallbackForecaster:
    """The LSTM while it is at least as good as the reactive forecast, which stands in otherwise."""

    name = "guarded"

    def __init__(
        self, lstm: LstmForecaster | None, history: LoadHistory | None = None, *, without_lstm: str = "no LSTM given"
    ) -> None:
        """Take the trained forecaster, or None and the reason why there is none; and what is known of the load."""
        self._lstm = lstm
        self._without_lstm = without_lstm
        self._history = history or LoadHistory()
        self._pending: deque[_Pending] = deque()
        self._score_forecast: deque[_ForecastScore] = deque(maxlen=RECENT_FORECASTS)
        self._last: Forecast | None = None

    def forecast(self, history_rps: ArrayLike, now_seconds: float) -> Forecast:
        """Score the forecasts whose time has come, then return the better source's new one.

        A second call for the same moment answers anew and is not scored twice. Histories are remembered, so that the
        network sees hours although each call brings minutes only.
        """
        history = check_history(history_rps)
        remembered = self._history.extend(history, now_seconds)
        self._score(history, now_seconds)
        fallback = reactive(history, "")
        if not fallback.is_measured:
            held = self._last.peak_rps if self._last else 0.0
            return replace(fallback, peak_rps=held, recent_error=self._reactive_error())
        lstm, shortfall = self._ask_lstm(remembered, now_seconds)
        if not self._pending or self._pending[-1].made_at_seconds < now_seconds:
            self._pending.append(_Pending(now_seconds, fallback, lstm))
        self._last = self._widen(self._choose(fallback, lstm, shortfall))
        return self._last

    def _widen(self, chosen: Forecast) -> Forecast:
        """Stretch the quantiles where recent peaks exceeded them more often than chance allows."""
        of_lstm = chosen.source == "lstm"
        reaches = [one.lstm_reach if of_lstm else one.reactive_reach for one in self._score_forecast]
        factor = widening_factor([reach for reach in reaches if reach is not None])
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
        pairs = [(one.lstm_error, one.reactive_error) for one in self._score_forecast if one.lstm_error is not None]
        if not pairs:
            return replace(lstm, reason="two minutes of history; no forecast scored yet")
        own, rival = (float(error) for error in np.mean(pairs, axis=0))
        compared = f"over the last {len(pairs)} forecasts: {own:.1%} against {rival:.1%}"
        if len(pairs) >= MIN_FORECASTS and own - rival > _standard_error(pairs) + MIN_DIFFERENCE:
            return replace(fallback, reason=f"LSTM worse than reactive {compared}")
        verdict = "no worse than reactive" if len(pairs) >= MIN_FORECASTS else "too few forecasts to judge LSTM"
        return replace(lstm, reason=f"{verdict} {compared}", recent_error=own)

    def _reactive_error(self) -> float | None:
        return float(np.mean([one.reactive_error for one in self._score_forecast])) if self._score_forecast else None

    def _score(self, history: NDArray[np.float64], now_seconds: float) -> None:
        if self._pending and now_seconds < self._pending[-1].made_at_seconds:
            self._pending.clear()  # the clock went back: nobody can say any more which seconds were meant
        while self._pending:
            elapsed = round(now_seconds - self._pending[0].made_at_seconds)
            if elapsed < HORIZON_SECONDS:
                return
            due = self._pending.popleft()
            start = history.size - elapsed
            came = history[max(start, 0) : max(start + HORIZON_SECONDS, 0)]
            if np.isfinite(came).sum() >= MIN_OBSERVED_SECONDS:
                self._score_forecast.append(_score_forecast(due, float(np.nanmax(came))))


def widening_factor(reaches: Sequence[float]) -> float:
    """By how much to stretch quantiles of which recent peaks reached so far; 1 where they kept to them."""
    count = len(reaches)
    if count < MIN_TO_WIDEN:
        return 1.0
    exceeded = sum(reach > 1.0 for reach in reaches)
    tail = 1.0 - CHECKED_QUANTILE
    if exceeded <= count * tail + 2 * (count * tail * CHECKED_QUANTILE) ** 0.5:
        return 1.0
    return min(float(np.quantile(reaches, CHECKED_QUANTILE, method="higher")), MAX_WIDENING)


def _standard_error(pairs: Sequence[tuple[float, float]]) -> float:
    """How far the mean difference of paired errors may be off by chance."""
    differences = np.array([own - rival for own, rival in pairs])
    return float(differences.std(ddof=1) / np.sqrt(differences.size))


def _score_forecast(due: _Pending, actual_rps: float) -> _ForecastScore:
    error, reach = smape([due.reactive.peak_rps], [actual_rps]), _reach(due.reactive, actual_rps)
    if due.lstm is None:
        return _ForecastScore(error, reach)
    return _ForecastScore(error, reach, smape([due.lstm.peak_rps], [actual_rps]), _reach(due.lstm, actual_rps))


def _reach(made: Forecast, actual_rps: float) -> float:
    distance = made.at(CHECKED_QUANTILE) - made.peak_rps
    above = actual_rps - made.peak_rps
    if distance > 0:
        return above / distance
    return 0.0 if above <= 0 else MAX_WIDENING


def shipped_forecaster(weights: Path = SHIPPED_WEIGHTS, history: LoadHistory | None = None) -> FallbackForecaster:
    """The guarded forecaster with the weights of this package; reactive, saying why, where they are unusable."""
    try:
        return FallbackForecaster(LstmForecaster(LstmWeights.load(weights)), history)
    except WeightsError as error:
        return FallbackForecaster(None, history, without_lstm=str(error))
