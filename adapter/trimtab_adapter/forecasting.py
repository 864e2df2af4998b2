"""Which forecaster a pipeline asks for, and what happens when its answer cannot be used. Around trimtab_predictor.

A forecast is advice: where it fails or is absurd, the last maximum takes its place and the record says so.
"""

import logging
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimtab_adapter.hysteresis import outgrows
from trimtab_adapter.observation import MOST_RPS, Load, ObservationError
from trimtab_pipelines.plan import ForecastRecord
from trimtab_pipelines.spec import Adaptation
from trimtab_predictor.forecaster import Forecast, Forecaster, OracleForecaster, ReactiveForecaster, reactive
from trimtab_predictor.guarded import shipped_forecaster
from trimtab_predictor.trace import TraceError, read_trace

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlayedTrace:
    """The load that will come, one line a second, and the Unix time its first second stands for."""

    path: Path
    start_seconds: float


def forecaster_for(adaptation: Adaptation, trace: PlayedTrace | None) -> Forecaster:
    """Return the forecaster a pipeline asks for; the reactive one, saying why, where an oracle knows no trace."""
    match adaptation.forecaster:
        case "LSTM":
            return shipped_forecaster()
        case "Reactive":
            return ReactiveForecaster()
        case "Oracle":
            return _oracle(trace)


def _oracle(trace: PlayedTrace | None) -> Forecaster:
    if trace is None:
        return ReactiveForecaster("no trace given for the oracle")
    try:
        return OracleForecaster(read_trace(trace.path, zeros_are_gaps=False), offset_seconds=-trace.start_seconds)
    except TraceError as error:
        return ReactiveForecaster(f"the oracle's trace cannot be used: {error}")


def forecast_record(forecaster: Forecaster, load: Load, headroom: float = 0.0) -> ForecastRecord:
    """Ask the forecaster; raise ObservationError where nothing of the load was measured.

    A forecast below what came in the newest second, headroom included, is replaced by that.
    """
    found = _ask(forecaster, load)
    if not found.is_measured:
        raise ObservationError(f"the load is not known: {found.reason}")
    if outgrows(load.newest_rps, found.peak_rps, headroom):
        came, expected = f"{load.newest_rps:g} requests/s came in the newest second", f"{found.peak_rps:.3g}"
        reason = f"{came}; {found.source} expected no more than {expected}"
        return ForecastRecord(peak_rps=load.newest_rps, observed_rps=load.peak_rps, source="reactive", reason=reason)
    return ForecastRecord(
        peak_rps=found.peak_rps,
        observed_rps=load.peak_rps,
        source=found.source,
        reason=found.reason,
        recent_error=found.recent_error,
    )


def _ask(forecaster: Forecaster, load: Load) -> Forecast:
    try:
        found = forecaster.forecast(load.history_rps, load.now_seconds)
    except Exception as error:
        log.exception("forecast failed; the last maximum takes its place")
        return _last_maximum(load, f"the forecaster failed: {type(error).__name__}: {error}")
    if math.isfinite(found.peak_rps) and 0 <= found.peak_rps <= MOST_RPS:
        return found
    log.warning("forecast of %s requests/s from %s refused", found.peak_rps, found.source)
    return _last_maximum(load, f"{found.source} forecast {found.peak_rps} requests/s, which cannot be")


def _last_maximum(load: Load, reason: str) -> Forecast:
    return reactive(np.asarray(load.history_rps, dtype=np.float64), reason)
