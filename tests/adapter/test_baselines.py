"""Static plans: the right variants, all of the budget, as much load as it can carry."""

import pytest

from tests.adapter.scenes import a_ladder, expected, profiles_of
from trimtab_adapter.planning.baselines import static_plan


@pytest.mark.parametrize(("which", "variant"), [("lightest", "light"), ("heaviest", "heavy")])
def test_static_plan_spends_the_budget_on_the_busiest_stages(which, variant):
    pipeline = a_ladder(budget={"cores": "5"})
    plan = static_plan(pipeline, profiles_of(pipeline), which, load_rps=10.0)

    assert [stage.variant for stage in plan.spec.stages] == [variant] * 2
    assert sorted(stage.replicas for stage in plan.spec.stages) == [2, 3]
    assert expected(plan).cores == 5.0
    assert plan.spec.feasible
    assert plan.spec.planned_fraction == 1.0
    assert expected(plan).latency_seconds <= 0.4


def test_the_heaviest_carries_less_and_says_so():
    pipeline = a_ladder(budget={"cores": "2"})
    profiles = profiles_of(pipeline)
    heaviest = static_plan(pipeline, profiles, "heaviest", load_rps=200.0)
    lightest = static_plan(pipeline, profiles, "lightest", load_rps=200.0)

    assert lightest.spec.planned_fraction == 1.0
    assert not heaviest.spec.feasible
    assert heaviest.spec.planned_fraction < 0.5
    assert heaviest.spec.reason.startswith("static: carries ")
    assert heaviest.spec.reason.endswith(" of 200 requests/s within the SLO")


def test_pins_and_floors_do_not_affect_baselines():
    pipeline = a_ladder(objective={"goal": "MinCost", "accuracyFloor": 0.9})
    plan = static_plan(pipeline, profiles_of(pipeline), "lightest", load_rps=10.0)

    assert plan.spec.reason == "Optimal"
    assert expected(plan).accuracy == pytest.approx(0.64)


def test_an_slo_no_variant_keeps_still_gives_a_plan():
    pipeline = a_ladder(slo={"latency": "1ms"})
    plan = static_plan(pipeline, profiles_of(pipeline), "heaviest", load_rps=10.0)

    assert not plan.spec.feasible
    assert [stage.variant for stage in plan.spec.stages] == ["heavy", "heavy"]
