"""Which forecaster a pipeline asks for, and what happens when its answer cannot be used.

A forecast is advice: when it fails or is absurd, the last maximum takes its place and the record says so.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trimtab_adapter.observation import MOST_RPS, Load
from trimtab_pipelines.plan import ForecastRecord
from trimtab_pipelines.spec import Adaptation

log = logging.getLogger(__name__)
REACTIVE_SECONDS = 20


class Forecast(Protocol):
    """A peak of the coming seconds and where it comes from, as trimtab_predictor gives it."""

    @property
    def peak_rps(self) -> float:
        """Requests per second."""

    @property
    def source(self) -> str:
        """`lstm`, `reactive` or `oracle`."""

    @property
    def reason(self) -> str:
        """Why this source."""

    @property
    def recent_error(self) -> float | None:
        """SMAPE of recent forecasts, 0…2, where known."""


class Forecaster(Protocol):
    """Whatever looks ahead."""

    def forecast(self, history_rps: Sequence[float], now_seconds: float) -> Forecast:
        """Return the peak of the coming seconds from the arrivals of the past ones, oldest first."""


@dataclass(frozen=True, slots=True)
class LastMaximum:
    """The most arrivals in one of the last seconds: what is left where no forecaster can be had."""

    reason: str

    def forecast(self, history_rps: Sequence[float], now_seconds: float) -> ForecastRecord:  # noqa: ARG002
        """Return the last maximum."""
        peak_rps = max(history_rps[-REACTIVE_SECONDS:], default=0.0)
        return ForecastRecord(peak_rps=peak_rps, source="reactive", reason=self.reason)


def forecaster_for(adaptation: Adaptation, trace: Path | None) -> Forecaster:  # noqa: ARG001
    """Return the forecaster a pipeline asks for."""
    return LastMaximum(f"{adaptation.forecaster} is not available")


def forecast_record(forecaster: Forecaster, load: Load) -> ForecastRecord:
    """Ask the forecaster; fall back to the last maximum where it fails."""
    found = _ask(forecaster, load)
    return ForecastRecord(
        peak_rps=float(found.peak_rps),
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
        why = f"the forecaster failed: {type(error).__name__}: {error}"
        return LastMaximum(why).forecast(load.history_rps, load.now_seconds)
    if math.isfinite(found.peak_rps) and 0 <= found.peak_rps <= MOST_RPS:
        return found
    log.warning("forecast of %s requests/s from %s refused", found.peak_rps, found.source)
    why = f"{found.source} forecast {found.peak_rps} requests/s, which cannot be"
    return LastMaximum(why).forecast(load.history_rps, load.now_seconds)
