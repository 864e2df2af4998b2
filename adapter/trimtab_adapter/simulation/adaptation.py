"""The slow loop in simulated time: what the adapter's `loop` does, without its files and addresses."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.decide import Situation, decide
from trimtab_adapter.forecasting import forecast_record, forecaster_for
from trimtab_adapter.hysteresis import outgrows
from trimtab_adapter.observation import MOST_ROWS, RATIO_RANGE, Load, Measured, damp
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import Adaptation as AdaptationSpec
from trimtab_pipelines.spec import InferencePipeline
from trimtab_predictor.forecaster import Forecaster, OracleForecaster
from trimtab_predictor.trace import Trace

Decide = Callable[[InferencePipeline, Mapping[str, ModelProfile], Situation], PipelinePlan]
"""The signature of `decide`, of the baselines and of whoever else wants to plan."""


@dataclass(slots=True)
class Adaptation:
    """Keeps what one tick hands to the next.

    Attributes:
        forecaster: what it asks.
        decide: what it decides by; ours where nothing else is given.
        origin_seconds: Unix time of the simulation's second 0; decisions carry it.
    """

    forecaster: Forecaster
    decide: Decide = decide
    origin_seconds: float = 0.0
    _recent: list[tuple[float, float]] = field(default_factory=list)
    _rows: dict[str, Measured] = field(default_factory=dict)
    _ratios: dict[tuple[str, str], Measured] = field(default_factory=dict)

    def tick(  # noqa: PLR0913, PLR0917 - all that a tick looks at
        self,
        pipeline: InferencePipeline,
        profiles: Mapping[str, ModelProfile],
        current: PipelinePlan,
        load: Load,
        rows_per_request: Mapping[str, float],
        service_ratios: Mapping[tuple[str, str], float],
    ) -> PipelinePlan:
        """Decide once. Raises ObservationError where the load is not known, PlanningError where nothing can run."""
        now = load.now_seconds
        for stage, rows in rows_per_request.items():
            self._rows[stage] = damp(self._rows.get(stage), rows, 0.0, MOST_ROWS)
        for key, ratio in service_ratios.items():
            self._ratios[key] = damp(self._ratios.get(key), ratio, *RATIO_RANGE)
        adaptation = pipeline.spec.adaptation
        forecast = forecast_record(self.forecaster, load, adaptation)
        self._recent = [(at, rps) for at, rps in self._recent if at >= now - adaptation.hold_seconds]
        situation = Situation(
            forecast=forecast,
            now_seconds=now,
            current=current,
            recent_rps=tuple(self._recent),
            rows_per_request={stage: rows.used for stage, rows in self._rows.items() if rows.used > 0},
            service_ratios={key: ratio.used for key, ratio in self._ratios.items()},
        )
        self._recent.append((now, forecast.peak_rps))
        return self.decide(pipeline, profiles, situation)


def forecaster_knowing(
    adaptation: AdaptationSpec, arrivals_seconds: NDArray[np.float64], duration_seconds: int, origin_seconds: float
) -> Forecaster:
    """Return the forecaster a pipeline asks for; an oracle knows the very arrivals of the simulation."""
    if adaptation.forecaster != "Oracle":
        return forecaster_for(adaptation, None)
    counts = np.bincount(arrivals_seconds.astype(np.int64), minlength=duration_seconds).astype(np.float64)
    return OracleForecaster(Trace(counts, "arrivals"), offset_seconds=-origin_seconds)


def outgrown(current: PipelinePlan, history_rps: Sequence[float], headroom: float) -> bool:
    """Tell whether the newest second's arrivals bring the next decision forward."""
    newest = history_rps[-1] if history_rps else 0.0
    forecast = current.spec.forecast
    return forecast is not None and math.isfinite(newest) and outgrows(newest, forecast.peak_rps, headroom)
