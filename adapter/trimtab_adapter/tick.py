"""What one tick of the slow loop found and decided: the record from which journal, status and metrics are written."""

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
    """One tick."""

    now_seconds: float
    """Unix time."""
    pipeline: InferencePipeline
    """What was asked for, its budget as far as it can be used."""
    decided: Decided
    """Whether the plan changed; held where none could be made; paused where none was wanted."""
    plan: PipelinePlan | None
    """The plan decided or held; the one proposed in Advisory mode; None before the first."""
    load: Load | None = None
    """What was observed; None where that failed."""
    forecast: ForecastRecord | None = None
    """This tick's own forecast, before it was held and steadied."""
    fault: Fault | None = None
    """What is the matter with the metrics."""
    problem: str = ""
    """Why the plan was held."""
    config_problem: str = ""
    served: RecentRequests | None = None
    """The last minute, where a router tells of it."""


def actionable_fields(plan: PipelinePlan) -> tuple[object, ...]:
    """What a reader of a plan acts on."""
    spec = plan.spec
    peak_rps = math.nan if spec.forecast is None else spec.forecast.peak_rps
    return spec.generation, spec.stages, spec.feasible, spec.reason, spec.planned_fraction, peak_rps
