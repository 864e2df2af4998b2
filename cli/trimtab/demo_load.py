"""How much load makes a pipeline change on this machine: from what the best variants carry to what none of them does.

A demonstration with fixed rates would show nothing on a machine twice as fast. Pure, given the profiles.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trimtab_adapter.planning.decide import PlanningInputs, decide
from trimtab_pipelines.plan import ForecastRecord, PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline

LEAST_RPS, MOST_RPS, STEPS = 0.5, 2000.0, 72
CALM_SHARE = 0.5
PRESSURE = 1.1
LEAST_RATIO = 8.0
BREATH = 0.85
UP_AND_DOWN_TWICE_SEED = 299  # within three minutes, with time at either end


@dataclass(frozen=True, slots=True)
class DemoLoad:
    """Rates, in requests per second, between which every stage has reason to change."""

    low_rps: float
    high_rps: float

    def load(self, seed: int = UP_AND_DOWN_TWICE_SEED, plateau_seconds: int = 25) -> str:
        """Write it as a load of the bundled generator."""
        rates = f"low={self.low_rps:.3g},high={self.high_rps:.3g}"
        return f"generated:{rates},seed={seed},plateau={plateau_seconds}"


def changing_load(pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile]) -> DemoLoad:
    """Find the range: low is carried by what runs when next to nothing comes, high by that in no stage.

    Where no load makes every stage change, high is most of what can be carried at all.
    """
    loads = np.geomspace(LEAST_RPS, MOST_RPS, STEPS)
    calm = _variants(_plan(pipeline, profiles, float(loads[0])))
    calm_until, high, most = float(loads[0]), 0.0, float(loads[0])
    for load in loads:
        plan = _plan(pipeline, profiles, float(load))
        if not plan.spec.feasible:
            break
        most = float(load)
        running = _variants(plan)
        if running == calm:
            calm_until = most
        if not high and all(running[stage] != variant for stage, variant in calm.items()):
            high = PRESSURE * most
    high = min(high or most, BREATH * most)
    return DemoLoad(min(CALM_SHARE * calm_until, high / LEAST_RATIO), high)


def _plan(pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], load_rps: float) -> PipelinePlan:
    return decide(pipeline, profiles, PlanningInputs(ForecastRecord(peak_rps=load_rps, source="given"), 0.0))


def _variants(plan: PipelinePlan) -> dict[str, str]:
    return {stage.name: stage.variant for stage in plan.spec.stages}
