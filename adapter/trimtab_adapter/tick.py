"""What one tick of the slow loop found and decided: the record from which journal, status and metrics are written."""

import math
from dataclasses import dataclass
from typing import Literal

from trimtab_adapter.observation import Fault, Load
from trimtab_pipelines.plan import ForecastRecord, PipelinePlan
from trimtab_pipelines.router_state import Served
from trimtab_pipelines.spec import InferencePipeline

Decided = Literal["changed", "kept", "held", "paused"]


@dataclass(frozen=True, slots=True)
class Tick:
    """One tick.

    Attributes:
        now_seconds: Unix time.
        pipeline: what was asked for, its budget as far as it can be used.
        decided: whether the plan changed; held where none could be made; paused where none was wanted.
        plan: the plan decided or held; the one proposed in Advisory mode; None before the first.
        load: what was observed; None where that failed.
        forecast: this tick's own forecast, before it was held and steadied.
        fault: what is the matter with the metrics.
        problem: why the plan was held.
        documents_problem: what is wrong with the newest pipeline or profiles; the last good ones stay in use.
        served: the last minute, where a router tells of it.
    """

    now_seconds: float
    pipeline: InferencePipeline
    decided: Decided
    plan: PipelinePlan | None
    load: Load | None = None
    forecast: ForecastRecord | None = None
    fault: Fault | None = None
    problem: str = ""
    documents_problem: str = ""
    served: Served | None = None


def essence(plan: PipelinePlan) -> tuple[object, ...]:
    """What a reader of a plan acts on."""
    spec = plan.spec
    peak_rps = math.nan if spec.forecast is None else spec.forecast.peak_rps
    return spec.generation, spec.stages, spec.feasible, spec.reason, spec.planned_fraction, peak_rps
