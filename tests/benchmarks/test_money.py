"""Rivals in money: HPA's rule with a plan's variants, and the flavor of least cost per capacity."""

import pytest

from benchmarks.money import GREEDY, HPA, rival_of
from benchmarks.papers.planners import plan_for_peak
from tests.builders import a_chain, a_pipeline, a_point_profile, a_profile, a_variant
from trimtab_adapter.planning.decide import PlanningInputs
from trimtab_pipelines.plan import ForecastRecord

CHEAPEST = {"goal": "MinCost", "accuracyFloor": 0.1}
DOLLARS = {"slow": 1.0, "fast": 4.0}
POINTS = [a_point_profile("m-slow", 0.0, 0.1), a_point_profile("m-fast", 0.0, 0.01)]
PROFILES = {"stage-0": a_profile("stage-0", POINTS)}


def a_priced_pipeline():
    (stage,) = a_chain(1)
    stage["variants"] = [a_variant(f"m-{flavor}", flavor=flavor) for flavor in DOLLARS]
    flavors = [{"name": name, "prices": {"core": price}} for name, price in DOLLARS.items()]
    return a_pipeline([stage], flavors=flavors, budget={"cores": "100"}, objective=CHEAPEST)


@pytest.mark.parametrize(("rival", "variant", "replicas"), [(HPA, "m-slow", 6), (GREEDY, "m-fast", 1)])
def test_a_rival_scales_its_variant_to_the_target(rival, variant, replicas):
    pipeline = a_priced_pipeline()
    plan = plan_for_peak(pipeline, PROFILES, 1.0)
    assert [stage.variant for stage in plan.spec.stages] == ["m-slow"]

    fixed = rival_of(plan, pipeline, PROFILES, greedy=rival == GREEDY)
    busy = fixed(pipeline, PROFILES, PlanningInputs(ForecastRecord(peak_rps=45.0, source="reactive"), 0.0))

    assert [(stage.variant, stage.replicas) for stage in busy.spec.stages] == [(variant, replicas)]
    assert fixed.dollars(pipeline, 45.0) == replicas * DOLLARS[variant.removeprefix("m-")]
