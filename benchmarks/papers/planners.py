"""The planners of FA2 and RIM, with the signature of `decide`: they give up one of our two ways to adapt.

FA2 scales and batches, but keeps one variant a stage; RIM switches variants, but keeps the number of replicas (IPA,
section 5). Both then plan with our own program, forecast and hysteresis, so that a difference is one of the method.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab_adapter.planning.baselines import pin_extreme, with_pins
from trimtab_adapter.planning.decide import PlanningInputs, decide
from trimtab_adapter.planning.planning_problem import PlanningProblem
from trimtab_pipelines.plan import ForecastRecord, PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.stages import Pin


@dataclass(slots=True)
class Pinned:
    """A planner that holds something fixed in each stage; call it as `decide`."""

    pins: Mapping[str, Pin]
    _seen: tuple[InferencePipeline, InferencePipeline] | None = field(default=None, repr=False)

    def __call__(
        self, pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], inputs: PlanningInputs
    ) -> PipelinePlan:
        """The best plan that keeps the pins."""
        if self._seen is None or self._seen[0] is not pipeline:
            spec = with_pins(pipeline.spec, {s.name: self.pins.get(s.name, s.pin) for s in pipeline.spec.stages})
            self._seen = (pipeline, pipeline.replace(spec=spec))
        return decide(self._seen[1], profiles, inputs)


def fa2(variants: Mapping[str, str]) -> Pinned:
    """FA2 with one variant a stage, by stage."""
    return Pinned({stage: Pin(variant=variant) for stage, variant in variants.items()})


def fa2_lightest(pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile]) -> Pinned:
    """FA2-low in its best form: the cheapest variant, and of equally cheap ones the most accurate."""
    problem = PlanningProblem(pipeline.spec, profiles, 0.0)
    return Pinned({stage.name: pin_extreme(problem, stage, "lightest") for stage in pipeline.spec.stages})


def fa2_heaviest(pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile]) -> Pinned:
    """FA2-high in its best form: the truly most accurate variants."""
    problem = PlanningProblem(pipeline.spec, profiles, 0.0)
    return Pinned({stage.name: pin_extreme(problem, stage, "heaviest") for stage in pipeline.spec.stages})


def rim(replicas: Mapping[str, int]) -> Pinned:
    """RIM with a number of replicas a stage, by stage."""
    return Pinned({stage: Pin(replicas=count) for stage, count in replicas.items()})


def rim_sized_for(pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], peak_rps: float) -> Pinned:
    """RIM in its best form: the replicas of the optimal plan for the peak, known beforehand."""
    plan = plan_for_peak(pipeline, profiles, peak_rps)
    return rim({stage.name: stage.replicas for stage in plan.spec.stages})


def plan_for_peak(
    pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], peak_rps: float, now_seconds: float = 0.0
) -> PipelinePlan:
    """The optimal plan for a load known beforehand, to be kept unchanged."""
    forecast = ForecastRecord(peak_rps=peak_rps, source="static", reason="the peak, known beforehand")
    return decide(pipeline, profiles, PlanningInputs(forecast, now_seconds))
