"""Control loop in simulated time: the adapter's `control_loop` without files and addresses."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trimtab_adapter.control_state import ControlState
from trimtab_adapter.forecasting import forecast_record, forecaster_for
from trimtab_adapter.observation import Load, State
from trimtab_adapter.planning.decide import Planner, decide
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import Adaptation, InferencePipeline
from trimtab_predictor.forecaster import Forecaster, OracleForecaster
from trimtab_predictor.trace import Trace


@dataclass(slots=True)
class SimulatedControlLoop:
    """A controller whose state lasts from one tick to the next."""

    forecaster: Forecaster
    decide: Planner = decide
    """The planner; `decide` by default."""
    origin_seconds: float = 0.0
    """Unix time of the simulation's second 0, recorded in decisions."""
    _state: ControlState = field(default_factory=ControlState)

    def tick(
        self,
        pipeline: InferencePipeline,
        profiles: Mapping[str, ModelProfile],
        current: PipelinePlan,
        load: Load,
        state: State,
    ) -> PipelinePlan:
        """Decide once.

        Raises ObservationError if the load is unknown, PlanningError if no plan exists.
        """
        self._state.update(state)
        adaptation = pipeline.spec.adaptation
        forecast = forecast_record(self.forecaster, load, adaptation)
        inputs = self._state.planning_inputs(
            forecast, current, load.now_seconds, adaptation.scale_down_stabilization_seconds
        )
        self._state.record_decision(load.now_seconds, forecast)
        return self.decide(pipeline, profiles, inputs)


def oracle_forecaster(
    adaptation: Adaptation, arrivals_seconds: NDArray[np.float64], duration_seconds: int, origin_seconds: float
) -> Forecaster:
    """The forecaster a pipeline asks for; an oracle knows the arrivals of the simulation."""
    if adaptation.forecaster != "Oracle":
        return forecaster_for(adaptation, None)
    counts = np.bincount(arrivals_seconds.astype(np.int64), minlength=duration_seconds).astype(np.float64)
    return OracleForecaster(Trace(counts, "arrivals"), offset_seconds=-origin_seconds)
