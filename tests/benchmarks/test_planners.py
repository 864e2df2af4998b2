"""The baselines' planners: each gives up one way to adapt, and only that."""

import pytest

from benchmarks.papers.planners import fa2, fa2_heaviest, fa2_lightest, plan_for_peak, rim, rim_sized_for
from tests.adapter.scenes import a_ladder, expected, profiles_of
from trimtab_adapter.planning.decide import PlanningInputs, decide
from trimtab_pipelines.plan import ForecastRecord

WEIGHTED = {"goal": "Weighted", "accuracyWeight": 10, "costWeight": 0.5}


def planned(planner, pipeline, load_rps):
    forecast = ForecastRecord(peak_rps=load_rps, source="reactive")
    return planner(pipeline, profiles_of(pipeline), PlanningInputs(forecast, 1000.0))


@pytest.mark.parametrize(
    ("planner", "fixed", "values"),
    [
        (fa2({"stage-0": "middle", "stage-1": "light"}), "variant", ["middle", "light"]),
        (rim({"stage-0": 2, "stage-1": 2}), "replicas", [2, 2]),
    ],
    ids=["FA2 never switches", "RIM never scales"],
)
def test_baseline_adapts_in_one_way(planner, fixed, values):
    pipeline = a_ladder(budget={"cores": "64"}, objective=WEIGHTED)
    calm, busy = (planned(planner, pipeline, load) for load in (5.0, 400.0))

    assert [[getattr(s, fixed) for s in plan.spec.stages] for plan in (calm, busy)] == [values] * 2
    assert (expected(busy).cores > expected(calm).cores) == (fixed == "variant")
    assert (expected(calm).accuracy > expected(busy).accuracy) == (fixed == "replicas")


def test_the_best_forms_are_the_cheapest_and_the_truly_heaviest():
    pipeline = a_ladder()
    profiles = profiles_of(pipeline)

    light = planned(fa2_lightest(pipeline, profiles), pipeline, 10.0)
    assert {stage.variant for stage in light.spec.stages} == {"light"}
    heavy = planned(fa2_heaviest(pipeline, profiles), pipeline, 10.0)
    assert {stage.variant for stage in heavy.spec.stages} == {"heavy"}


def test_rim_in_its_best_form_carries_the_peak_it_was_sized_for():
    pipeline = a_ladder(budget={"cores": "64"}, objective=WEIGHTED)
    planner = rim_sized_for(pipeline, profiles_of(pipeline), 200.0)

    assert planned(planner, pipeline, 200.0).spec.feasible


@pytest.mark.parametrize("load", [5.0, 60.0, 200.0])
def test_no_rival_has_a_better_objective_than_ours(load):
    pipeline = a_ladder(budget={"cores": "64"}, objective=WEIGHTED)
    profiles = profiles_of(pipeline)
    ours = expected(planned(decide, pipeline, load)).objective
    rivals = (
        fa2({"stage-0": "light", "stage-1": "heavy"}),
        fa2_lightest(pipeline, profiles),
        fa2_heaviest(pipeline, profiles),
        rim_sized_for(pipeline, profiles, load),
    )

    assert all(expected(planned(rival, pipeline, load)).objective <= ours + 1e-9 for rival in rivals)


def test_a_plan_for_the_peak_carries_it():
    pipeline = a_ladder(budget={"cores": "64"})

    assert plan_for_peak(pipeline, profiles_of(pipeline), 100.0).spec.planned_fraction == 1.0
