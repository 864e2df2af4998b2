"""`Tick`: the outcome of one tick of the control loop, from which decision log, status and metrics are written."""

import math
from dataclasses import dataclass
from typing import Literal

from trimtab_adapter.observation import Fault, Load
from trimtab_pipelines.plan import ForecastRecord, PipelinePlan
from trimtab_pipelines.router_state import RecentRequests
from trimtab_pipelines.spec import InferencePipeline

Decided = Literal["changed", "kept", "held", "paused"]


@dataclass(frozen=True, slots=True)
class Tick:
    """Observation, forecast and plan of one tick."""

    now_seconds: float
    """Unix time."""
    pipeline: InferencePipeline
    """The pipeline, its budget limited to what is schedulable."""
    decided: Decided
    """Whether the plan changed; `held` if none could be computed; `paused` if the pipeline is paused."""
    plan: PipelinePlan | None
    """The plan decided or held; the proposed one in Advisory mode; None before the first."""
    load: Load | None = None
    """The observed load; None if the observation failed."""
    forecast: ForecastRecord | None = None
    """This tick's forecast, before hysteresis."""
    fault: Fault | None = None
    """The metrics' fault."""
    problem: str = ""
    """The reason why the plan was held."""
    config_problem: str = ""
    """The error of the newest pipeline or profiles; the last valid ones stay in use."""
    served: RecentRequests | None = None
    """Requests of the last minute, if a router reports them."""


def actionable_fields(plan: PipelinePlan) -> tuple[object, ...]:
    """The fields of a plan that its readers act on."""
    spec = plan.spec
    peak_rps = math.nan if spec.forecast is None else spec.forecast.peak_rps
    return spec.generation, spec.stages, spec.feasible, spec.reason, spec.planned_fraction, peak_rps
