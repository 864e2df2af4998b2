"""Forecasting: selects a pipeline's forecaster and validates its forecasts.

If a forecaster fails or returns an impossible value, the reactive forecast replaces it and the record has the reason.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trimtab_adapter.observation import MAX_RPS, Load
from trimtab_adapter.planning.hysteresis import outgrows
from trimtab_adapter.planning.latency import busiest_rps, sustained_load_rps
from trimtab_pipelines.plan import ForecastRecord
from trimtab_pipelines.spec import Adaptation
from trimtab_predictor.fallback_forecaster import FallbackForecaster, shipped_forecaster
from trimtab_predictor.forecaster import Forecast, Forecaster, OracleForecaster, ReactiveForecaster, reactive
from trimtab_predictor.load_history import LoadHistory, ObservationError
from trimtab_predictor.lstm import LstmForecaster, LstmWeights, WeightsError
from trimtab_predictor.trace import TraceError, read_trace

log = logging.getLogger(__name__)

TREND_BLOCK_SECONDS, TREND_BLOCKS, MIN_TREND_BLOCKS = 10, 12, 9
RISE_SECONDS = (2, 4)
"""Newest seconds whose mean shows a smaller rise than the newest one can."""
RISE_NOISE_WIDTHS = 3.1
"""Standard deviations that noise may rise: one second in a thousand has more."""
TREND_NOISE_WIDTHS = 3.5
"""Standard deviations of a block's mean that noise may rise over the blocks."""


@dataclass(frozen=True, slots=True)
class PlayedTrace:
    """The trace being played, one line a second, and the Unix time of its first second."""

    path: Path
    start_seconds: float


def forecaster_for(adaptation: Adaptation, trace: PlayedTrace | None) -> Forecaster:
    """The forecaster a pipeline asks for; the reactive one with a reason if an oracle has no trace."""
    match adaptation.forecaster:
        case "LSTM":
            return shipped_forecaster()
        case "Reactive":
            return ReactiveForecaster()
        case "Oracle":
            if trace is None:
                return ReactiveForecaster("the oracle has no trace")
            try:
                load = read_trace(trace.path, zeros_are_gaps=False)
            except TraceError as error:
                return ReactiveForecaster(f"the oracle's trace is invalid: {error}")
            return OracleForecaster(load, offset_seconds=-trace.start_seconds)


class TrainedWeights:
    """Weights trained in this cluster, from a folder that may be empty and may change; else the package's."""

    FILE = "lstm.npz"

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / self.FILE
        self._stamp: tuple[int, int] | None = None
        self._lstm: LstmForecaster | None = None
        self.version = 0  # increases whenever the weights change

    def refresh(self) -> None:
        """Load the weights if they changed; invalid ones leave those in use."""
        stamp = None if self._path is None else file_stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._lstm = None if self._path is None or stamp is None else LstmForecaster(LstmWeights.load(self._path))
        except WeightsError as error:
            log.warning("%s; the weights in use stay", error)
            return
        self.version += 1
        log.info("forecasting with the weights of %s", "this release" if self._lstm is None else self._path)

    def forecaster(self, history: LoadHistory) -> Forecaster:
        return shipped_forecaster(history=history) if self._lstm is None else FallbackForecaster(self._lstm, history)


def file_stamp(path: Path) -> tuple[int, int] | None:
    """Modification time and size of a file, None without it."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


class CurrentForecaster:
    """The forecaster a pipeline asks for, rebuilt when the choice or the weights change; the load history stays."""

    def __init__(self, adaptation: Callable[[], Adaptation], weights: TrainedWeights) -> None:
        self._adaptation, self._weights = adaptation, weights
        self._built_for: tuple[str, int] | None = None
        self._inner: Forecaster = ReactiveForecaster()
        self._history = LoadHistory()

    def forecast(self, history_rps: ArrayLike, now_seconds: float) -> Forecast:
        self._weights.refresh()
        adaptation = self._adaptation()
        key = (adaptation.forecaster, self._weights.version)
        if key != self._built_for:
            trained = adaptation.forecaster == "LSTM"
            self._inner = self._weights.forecaster(self._history) if trained else forecaster_for(adaptation, None)
            self._built_for = key
        return self._inner.forecast(history_rps, now_seconds)


def forecast_record(forecaster: Forecaster, load: Load, adaptation: Adaptation) -> ForecastRecord:
    """Forecast the demand to plan for; raise ObservationError if no load was measured.

    The demand is the forecast peak, or the quantile the pipeline asks for. If the newest second's arrivals exceed it,
    headroom included, they replace it.
    """
    forecast = _ask(forecaster, load)
    if not forecast.is_measured:
        raise ObservationError(f"the load is not known: {forecast.reason}", "Missing")
    quantile = adaptation.demand_quantile
    demand_rps = forecast.peak_rps if quantile is None else min(forecast.at(quantile), MAX_RPS)
    if outgrows(load.newest_rps, demand_rps, adaptation.headroom):
        arrived, expected = f"{load.newest_rps:g} requests/s arrived in the newest second", f"{demand_rps:.3g}"
        reason = f"{arrived}; {forecast.source} expected no more than {expected}"
        return ForecastRecord(peak_rps=load.newest_rps, observed_rps=load.peak_rps, source="reactive", reason=reason)
    return ForecastRecord(
        peak_rps=demand_rps,
        quantile=quantile,
        observed_rps=load.peak_rps,
        source=forecast.source,
        reason=forecast.reason,
        recent_error=forecast.recent_error,
    )


def not_below_rise(forecast: ForecastRecord, load: Load, planned_rps: float, horizon_seconds: float) -> ForecastRecord:
    """The forecast of a load that outgrew its plan: at least the busiest second at the rate to which it clearly rose.

    Repeating the newest second would plan a rise several times, once for each busier second after it. A second that
    the planned rate brings by chance is no rise.
    """
    risen_rps = clear_rise_rps(load, sustained_load_rps(planned_rps, horizon_seconds))
    peak_rps = busiest_rps(risen_rps, horizon_seconds)
    if forecast.peak_rps >= peak_rps:
        return forecast
    reason = f"{risen_rps:.4g} requests/s arrived in the newest seconds, more than planned for"
    return forecast.replace(peak_rps=peak_rps, source="reactive", reason=reason)


def clear_rise_rps(load: Load, planned_rps: float) -> float:
    """The mean of the newest seconds that Poisson arrivals at the planned rate do not explain; 0 if these explain all.

    The square root of a Poisson count has a standard deviation of 1/2 at any rate (Anscombe).
    """
    counts = {1: load.newest_rps} | {seconds: math.fsum(load.history_rps[-seconds:]) for seconds in RISE_SECONDS}
    return max(
        (
            count / seconds
            for seconds, count in counts.items()
            if math.sqrt(count) - math.sqrt(seconds * planned_rps) > RISE_NOISE_WIDTHS / 2
        ),
        default=0.0,
    )


def not_below_trend(
    forecast: ForecastRecord, history_rps: Sequence[float], lead_seconds: float, horizon_seconds: float
) -> ForecastRecord:
    """The forecast; if nodes start later than its horizon, at least the busiest second of the trend by then."""
    if lead_seconds <= horizon_seconds:
        return forecast
    peak_rps = busiest_rps(trend_rps(history_rps, lead_seconds + horizon_seconds), horizon_seconds)
    if forecast.peak_rps >= peak_rps:
        return forecast
    reason = f"the load rises, and nodes take up to {lead_seconds:.4g} s to start"
    return forecast.replace(peak_rps=peak_rps, source="reactive", reason=reason)


def trend_rps(history_rps: Sequence[float], ahead_seconds: float) -> float:
    """The mean load expected so many seconds ahead, at most twice the present one; 0 without a clear rise.

    The trend is the median slope (Theil-Sen) of means over TREND_BLOCK_SECONDS: the lesser one of the last two minutes
    and of their newer half, in which a step that is over no longer counts.
    """
    count = min(len(history_rps) // TREND_BLOCK_SECONDS, TREND_BLOCKS)
    newest = np.asarray(history_rps, dtype=np.float64)[len(history_rps) - count * TREND_BLOCK_SECONDS :]
    blocks = newest.reshape(count, TREND_BLOCK_SECONDS).mean(axis=1)
    if count < MIN_TREND_BLOCKS or np.isnan(blocks).any():
        return 0.0
    slope = min(_median_slope(blocks), _median_slope(blocks[count // 2 :]))
    present = float(np.median(blocks + slope * np.arange(count - 1, -1, -1)))
    if slope * count <= TREND_NOISE_WIDTHS * math.sqrt(float(blocks.mean()) / TREND_BLOCK_SECONDS):
        return 0.0
    return min(present + slope * ahead_seconds / TREND_BLOCK_SECONDS, 2.0 * present)


def _median_slope(values: NDArray[np.float64]) -> float:
    early, late = np.triu_indices(values.size, 1)
    return float(np.median((values[late] - values[early]) / (late - early)))


def not_below(planned: ForecastRecord | None, forecast: ForecastRecord, missing: str) -> ForecastRecord:
    """The forecast; if part of the load is missing, at least the plan's."""
    if not missing or planned is None or forecast.peak_rps >= planned.peak_rps:
        return forecast
    reason = f"not below the plan's, because part of the load is unknown: {missing}"
    return forecast.replace(peak_rps=planned.peak_rps, reason=reason)


def _ask(forecaster: Forecaster, load: Load) -> Forecast:
    """The forecast; the last maximum with the reason if the forecaster fails or its forecast is impossible."""
    try:
        forecast = forecaster.forecast(load.history_rps, load.now_seconds)
        if 0 <= forecast.peak_rps <= MAX_RPS:
            return forecast
        reason = f"{forecast.source} forecast {forecast.peak_rps} requests/s, which is invalid"
        log.warning("%s", reason)
    except Exception as error:
        log.exception("forecast failed; using the last maximum")
        reason = f"the forecaster failed: {type(error).__name__}: {error}"
    return reactive(np.asarray(load.history_rps, dtype=np.float64), reason)
