"""Which forecaster a pipeline asks for, and what happens when its answer cannot be used. Around trimtab_predictor.

A forecast is advice: where it fails or is absurd, the last maximum takes its place and the record says so.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from trimtab_adapter.observation import MAX_RPS, Load, ObservationError
from trimtab_adapter.planning.hysteresis import outgrows
from trimtab_pipelines.plan import ForecastRecord
from trimtab_pipelines.spec import Adaptation
from trimtab_predictor.fallback_forecaster import FallbackForecaster, shipped_forecaster
from trimtab_predictor.forecaster import Forecast, Forecaster, OracleForecaster, ReactiveForecaster, reactive
from trimtab_predictor.load_history import LoadHistory
from trimtab_predictor.lstm import LstmForecaster, LstmWeights, WeightsError
from trimtab_predictor.trace import TraceError, read_trace

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlayedTrace:
    """The load that will come, one line a second, and the Unix time its first second stands for."""

    path: Path
    start_seconds: float


def forecaster_for(adaptation: Adaptation, trace: PlayedTrace | None) -> Forecaster:
    """The forecaster a pipeline asks for; the reactive one, saying why, where an oracle knows no trace."""
    match adaptation.forecaster:
        case "LSTM":
            return shipped_forecaster()
        case "Reactive":
            return ReactiveForecaster()
        case "Oracle":
            return _oracle(trace)


class TrainedWeights:
    """Weights trained in this cluster, in a folder that may be empty and may change; else those of the package."""

    FILE = "lstm.npz"

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / self.FILE
        self._stamp: tuple[int, int] | None = None
        self._lstm: LstmForecaster | None = None
        self.version = 0  # grows whenever other weights are in use

    def refresh(self) -> None:
        """Read the weights where they changed; broken ones leave those in use."""
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        if self._path is None or stamp is None:
            self._lstm = None
            self.version += 1
            return
        try:
            self._lstm = LstmForecaster(LstmWeights.load(self._path))
        except WeightsError as error:
            log.warning("%s; the weights in use stay", error)
            return
        self.version += 1
        log.info("forecasting with the weights of %s", self._path)

    def forecaster(self, memory: LoadHistory) -> Forecaster:
        """A new forecaster with the weights in use; it knows of a load what is remembered, and scores itself."""
        return shipped_forecaster(memory=memory) if self._lstm is None else FallbackForecaster(self._lstm, memory)

    def _stamp_now(self) -> tuple[int, int] | None:
        if self._path is None:
            return None
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size


class CurrentForecaster:
    """The forecaster a pipeline asks for at the moment, made anew when it asks for another or the weights change.

    What is remembered of the load outlives it.
    """

    name = "current"

    def __init__(self, asked: Callable[[], Adaptation], weights: TrainedWeights) -> None:
        self._asked, self._weights = asked, weights
        self._made_for: tuple[str, int] | None = None
        self._inner: Forecaster = ReactiveForecaster()
        self._memory = LoadHistory()

    def forecast(self, history_rps: ArrayLike, now_seconds: float) -> Forecast:
        """Forecast with whichever is asked for now."""
        self._weights.refresh()
        adaptation = self._asked()
        wanted = (adaptation.forecaster, self._weights.version)
        if wanted != self._made_for:
            trained = adaptation.forecaster == "LSTM"
            self._inner = self._weights.forecaster(self._memory) if trained else forecaster_for(adaptation, None)
            self._made_for = wanted
        return self._inner.forecast(history_rps, now_seconds)


def _oracle(trace: PlayedTrace | None) -> Forecaster:
    if trace is None:
        return ReactiveForecaster("no trace given for the oracle")
    try:
        return OracleForecaster(read_trace(trace.path, zeros_are_gaps=False), offset_seconds=-trace.start_seconds)
    except TraceError as error:
        return ReactiveForecaster(f"the oracle's trace cannot be used: {error}")


def forecast_record(forecaster: Forecaster, load: Load, adaptation: Adaptation) -> ForecastRecord:
    """Ask the forecaster for the demand to plan for; raise ObservationError where nothing of the load was measured.

    The demand is the forecast peak, or the quantile of it that the pipeline asks for. One below what came in the newest
    second, headroom included, is replaced by that.
    """
    found = _ask(forecaster, load)
    if not found.is_measured:
        raise ObservationError(f"the load is not known: {found.reason}", "Missing")
    quantile = adaptation.demand_quantile
    demand_rps = found.peak_rps if quantile is None else min(found.at(quantile), MAX_RPS)
    if outgrows(load.newest_rps, demand_rps, adaptation.headroom):
        came, expected = f"{load.newest_rps:g} requests/s came in the newest second", f"{demand_rps:.3g}"
        reason = f"{came}; {found.source} expected no more than {expected}"
        return ForecastRecord(peak_rps=load.newest_rps, observed_rps=load.peak_rps, source="reactive", reason=reason)
    return ForecastRecord(
        peak_rps=demand_rps,
        quantile=quantile,
        observed_rps=load.peak_rps,
        source=found.source,
        reason=found.reason,
        recent_error=found.recent_error,
    )


def not_below(planned: ForecastRecord | None, forecast: ForecastRecord, missing: str) -> ForecastRecord:
    """The forecast; where part of the load could not be seen, not below what the plan stands on."""
    if not missing or planned is None or forecast.peak_rps >= planned.peak_rps:
        return forecast
    reason = f"not below the plan's, for part of the load is not known: {missing}"
    return forecast.model_copy(update={"peak_rps": planned.peak_rps, "reason": reason})


def _ask(forecaster: Forecaster, load: Load) -> Forecast:
    try:
        found = forecaster.forecast(load.history_rps, load.now_seconds)
    except Exception as error:
        log.exception("forecast failed; the last maximum takes its place")
        return _last_maximum(load, f"the forecaster failed: {type(error).__name__}: {error}")
    if math.isfinite(found.peak_rps) and 0 <= found.peak_rps <= MAX_RPS:
        return found
    log.warning("forecast of %s requests/s from %s refused", found.peak_rps, found.source)
    return _last_maximum(load, f"{found.source} forecast {found.peak_rps} requests/s, which cannot be")


def _last_maximum(load: Load, reason: str) -> Forecast:
    return reactive(np.asarray(load.history_rps, dtype=np.float64), reason)
