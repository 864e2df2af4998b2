"""Load of a demonstration: its range makes every stage change variants on this machine.

Fixed rates would show no change on a machine twice as fast.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from trimtab_adapter.planning.baselines import with_single_variants
from trimtab_adapter.planning.decide import PlanningInputs, decide
from trimtab_pipelines.plan import ForecastRecord, PipelinePlan
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.spec import InferencePipeline

MIN_RPS, MAX_RPS, STEPS = 0.5, 2000.0, 72
LOW_SHARE = 0.5
"""Low rate as a share of the highest rate that the initial variants serve."""
OVERLOAD_FACTOR = 1.5
"""The high rate over the least at which every stage needs other variants: fixed heaviest ones are overloaded then."""
MIN_RATIO = 8.0
CAPACITY_SHARE = 0.85
"""Upper bound of the high rate as a share of the highest feasible rate."""
ROUTER_SECONDS, REQUEST_SECONDS = 0.0035, 0.005
"""Processor time of a request in the router, and in router, proxy and load generator together."""
ROUTER_SHARE, REPLICAS_SHARE = 0.7, 0.7
"""Shares of the router's core, and of the budget's cores, that are in use at the high rate."""
TWO_PEAKS_SEED = 299
"""Seed with which the load rises and falls twice within three minutes, with plateaus at both ends."""


@dataclass(frozen=True, slots=True)
class DemoLoad:
    """Rates, in requests per second, between which every stage changes variants."""

    low_rps: float
    high_rps: float

    def spec(self, seed: int = TWO_PEAKS_SEED, plateau_seconds: int = 25) -> str:
        """Return the load as a specification of the bundled generator."""
        rates = f"low={self.low_rps:.3g},high={self.high_rps:.3g}"
        return f"generated:{rates},seed={seed},plateau={plateau_seconds}"


def changing_load(pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], cores: float) -> DemoLoad:
    """Find the range: at the low rate the initial variants suffice, at the high rate those of no stage do.

    Plans are those of one variant at a time, so that a policy that mixes variants meets the same load.
    If no load makes every stage change, the high rate is close to the highest feasible rate. It leaves enough of the
    machine's `cores` to router, proxy and load generator.
    """
    pipeline = with_single_variants(pipeline)
    loads = np.geomspace(MIN_RPS, MAX_RPS, STEPS)
    initial = _variants(_plan(pipeline, profiles, float(loads[0])))
    initial_until, high, feasible_until = float(loads[0]), 0.0, float(loads[0])
    for load in loads:
        plan = _plan(pipeline, profiles, float(load))
        if not plan.spec.feasible:
            break
        feasible_until = float(load)
        variants = _variants(plan)
        if variants == initial:
            initial_until = feasible_until
        if not high and all(variants[stage] != variant for stage, variant in initial.items()):
            high = OVERLOAD_FACTOR * feasible_until
    high = min(high or feasible_until, CAPACITY_SHARE * feasible_until, _routed_rps(pipeline, cores))
    return DemoLoad(min(LOW_SHARE * initial_until, high / MIN_RATIO), high)


def _routed_rps(pipeline: InferencePipeline, cores: float) -> float:
    """Return the rate that one router carries beside the replicas."""
    free_cores = cores - REPLICAS_SHARE * min(pipeline.spec.budget.cores, cores)
    return min(ROUTER_SHARE / ROUTER_SECONDS, free_cores / REQUEST_SECONDS)


def _plan(pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], load_rps: float) -> PipelinePlan:
    return decide(pipeline, profiles, PlanningInputs(ForecastRecord(peak_rps=load_rps, source="given"), 0.0))


def _variants(plan: PipelinePlan) -> dict[str, str]:
    return {stage.name: stage.variant for stage in plan.spec.stages}
