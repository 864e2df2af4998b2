"""Forecasts of every forecaster on the same windows of the same loads."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.load_shapes import RULES, drawn, excerpts
from trimtab_adapter.observation import lookback_seconds
from trimtab_predictor.context import load_context
from trimtab_predictor.fallback_forecaster import FallbackForecaster
from trimtab_predictor.features import BIN_SECONDS, BINS, HISTORY_SECONDS
from trimtab_predictor.forecaster import HORIZON_SECONDS, smape
from trimtab_predictor.load_history import seconds_of_bins
from trimtab_predictor.lstm import QUANTILES, LstmForecaster, LstmWeights, forecast_quantiles
from trimtab_predictor.windows import WINDOW_SECONDS, cut_windows, scaled_load

STRIDE_SECONDS = 10
DRAWN_SECONDS = 3_600
DRAWN_LEVELS_RPS = (0.3, 5.0, 60.0, 5000.0)
DRAWS = 51
KNOWN_RATE = "known rate"
SERVED = "LSTM as served"
AS_RECORDED = "_at_1_1"
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
        """The SMAPE of each forecaster."""
        return {name: smape(said, self.peaks) for name, said in self.forecasts.items()}


class Judge:
    """Asks every forecaster about the same loads."""

    def __init__(self, learned: Load, weights: LstmWeights) -> None:
        self._weights = weights
        fit = cut_windows(learned, STRIDE_SECONDS)
        self._ar_coefficients, *_ = np.linalg.lstsq(_bin_peaks(fit.histories_rps), fit.peaks_rps, rcond=None)

    def ask(
        self,
        load: Load,
        first: int = 0,
        end: int | None = None,
        *,
        served: bool = True,
        before: Load | None = None,
        larger: Load | None = None,
    ) -> Moments:
        """What each forecaster said every ten seconds of a load [S]; NaN seconds are left out.

        Args:
            load: requests per second.
            first: the second to begin with; what came before it is known.
            end: the second to end before; the load's end where None.
            served: also play the load through the forecaster as the adapter uses it, one moment after the other.
            before: the load one day earlier [S], for the seasonal forecast.
            larger: the load [S] that this one was thinned from, for a forecast that knows what rate will come.
        """
        # Two minutes before an excerpt are history, so that its first second is forecast, too.
        last = (load.size if end is None else end) - WINDOW_SECONDS
        starts = np.arange(max(first - HISTORY_SECONDS, 0), last + 1, STRIDE_SECONDS)
        view = _cut(load, starts)
        whole = ~np.isnan(view).any(axis=1)
        histories, futures = view[whole, :HISTORY_SECONDS], view[whole, HISTORY_SECONDS:]
        quantiles = forecast_quantiles(self._weights, histories, load_context(load, starts[whole] + HISTORY_SECONDS))
        reactive = histories[:, -HORIZON_SECONDS:].max(axis=1)
        said = {
            "LSTM": quantiles[:, 0],
            "reactive": reactive,
            "last-max": histories[:, -BIN_SECONDS:].max(axis=1),
            "AR(12)": _bin_peaks(histories) @ self._ar_coefficients,
            "oracle": futures.max(axis=1),
        }
        said |= {f"LSTM P{q * 100:.0f}": quantiles[:, k] for k, q in enumerate(QUANTILES) if k}
        if before is not None:
            ended = _cut(before, starts)[whole, HISTORY_SECONDS:]
            yesterday = np.where(np.isnan(ended), -np.inf, ended).max(axis=1)
            said["seasonal"] = np.where(np.isfinite(yesterday), yesterday, reactive)
        if larger is not None:
            said[KNOWN_RATE] = _knowing_the_rate(_cut(larger, starts)[whole, HISTORY_SECONDS:], load, larger)
        if served:
            said[SERVED] = _served(self._weights, load, starts[whole])
        return Moments(histories, futures, said)


def _bin_peaks(histories: Load) -> Load:
    """The inputs of AR(12), [N, 13]: the peak of each ten seconds, and a 1 for the intercept."""
    return np.pad(histories.reshape(-1, BINS, BIN_SECONDS).max(axis=2), ((0, 0), (0, 1)), constant_values=1.0)


def _cut(load: Load, starts: NDArray[np.int64]) -> Load:
    windows: Load = np.lib.stride_tricks.sliding_window_view(load, WINDOW_SECONDS)[starts]
    return windows


def _knowing_the_rate(futures: Load, load: Load, larger: Load) -> Load:
    """The median peak if each of the larger load's requests [N, 20] comes with the same chance, by drawing.

    The rest of the error is the randomness of arrivals, which no forecaster can foresee.
    """
    chance = float(np.nansum(load) / np.nansum(larger))
    rng = np.random.default_rng(1)
    drawn_peaks = [rng.binomial(futures.astype(np.int64), chance).max(axis=1) for _ in range(DRAWS)]
    median: Load = np.median(drawn_peaks, axis=0)
    return median


def _served(weights: LstmWeights, load: Load, starts: NDArray[np.int64]) -> Load:
    """Ask as the adapter does: with all that is kept at first, then with the last ten minutes."""
    forecaster = FallbackForecaster(LstmForecaster(weights))
    answers, asked_at = [], -math.inf
    for end in starts + HISTORY_SECONDS:
        history = load[max(0, end - lookback_seconds(end - asked_at)) : end]
        answers.append(forecaster.forecast(history, float(end)).peak_rps)
        asked_at = float(end)
    return np.array(answers)


def by_shape(learned: Load, held_back: Load, weights: LstmWeights) -> dict[str, dict[str, float]]:
    """Each forecaster's error on every shape: excerpts of the trace, also an eighth as large, and drawn ones.

    AR(12) is fitted anew at each size, on the earlier days as a service of that size would have seen them.
    """
    rng = np.random.default_rng(5)
    found: dict[str, dict[str, float]] = {}
    for factor in (1.0, 8.0):
        judge, scaled = Judge(scaled_load(learned, factor), weights), scaled_load(held_back, factor)
        for shape, (length, _) in RULES.items():
            larger = held_back if factor > 1 else None
            parts = [judge.ask(scaled, at, at + length, larger=larger) for at in excerpts(held_back, shape)]
            if parts:
                found[f"{shape}_at_1_{factor:g}"] = _pooled(parts)
    for level in DRAWN_LEVELS_RPS:
        judge = Judge(scaled_load(learned, float(np.nanmean(learned)) / level), weights)
        for shape, load in drawn(DRAWN_SECONDS, level, rng).items():
            found[f"{shape}_{level:g}_rps"] = judge.ask(load).errors()
    return found


def _pooled(parts: Sequence[Moments]) -> dict[str, float]:
    names = parts[0].forecasts
    peaks = np.concatenate([part.peaks for part in parts])
    return {name: smape(np.concatenate([part.forecasts[name] for part in parts]), peaks) for name in names}


def rebuilt(load: Load) -> Load:
    """What a metrics server keeps of a load, as seconds again: a peak and a mean every ten seconds."""
    bins = load[: load.size // BIN_SECONDS * BIN_SECONDS].reshape(-1, BIN_SECONDS)
    return seconds_of_bins(zip(bins.max(axis=1).tolist(), bins.mean(axis=1).tolist(), strict=True))
