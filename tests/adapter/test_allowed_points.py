"""Operating points of a plan: their order, their cost in replicas, and the reasons of the excluded points."""

import pytest

from tests.builders import a_pipeline, a_profile, a_stage, a_variant, point_profiles
from trimtab_adapter.planning.decide import initial_plan
from trimtab_adapter.planning.latency import sustained_load_rps
from trimtab_router.scheduling.policies import POLICIES

SECONDS = {"full": (0.040, 0.010), "half": (0.004, 0.002)}
POINTS = [{"name": "full", "accuracy": 0.9}, {"name": "half", "accuracy": 0.8}]
INPUTS = [{"name": "x", "from": "request.inputs.x"}, {"name": "z", "from": "request.inputs.z", "optional": True}]


def planned(load_rps=1.0, points=POINTS, seconds=SECONDS, stage=None, **spec):
    """Plan one stage of one variant whose points were measured to take constant + linear × rows."""
    one = a_stage("only", inputs=INPUTS, variants=[a_variant(operatingPoints=points)], batchSizes=[1, 8]) | (
        stage or {}
    )
    pipeline = a_pipeline(
        [one],
        inputs=[{"name": name, "datatype": "FP32", "shape": [4], "optional": name == "z"} for name in "xz"],
        **{"slo": {"latency": "500ms"}, "budget": {"cores": "64"}, "schedulingPolicy": "SlackFit"} | spec,
    )
    return initial_plan(pipeline, {"only": a_profile("only", point_profiles(seconds))}, load_rps).spec


def names(plan):
    return [point.name for point in plan.stages[0].points]


def test_points_stand_in_the_plan_with_all_the_router_decides_by():
    tasks = {"crops": {"value": 0.7, "low": 0.6}}
    points = [POINTS[0], POINTS[1] | {"modalities": ["x"], "accuracyByTask": tasks}]
    stage = planned(points=points).stages[0]
    half = stage.fallbacks[0]

    assert names(planned(points=points)) == ["full", "half"]
    assert (half.accuracy, half.accuracy_by_task, half.inputs) == (0.8, {"crops": 0.7}, ("x",))
    assert half.service_seconds.keys() == stage.service_seconds.keys() == set(range(stage.batch_size + 1)) & {1, 8}


@pytest.mark.parametrize(("policy", "fallbacks"), [("SlackFit", ["half"]), ("EarliestDeadlineFirst", [])])
def test_more_accurate_points_are_upgrades_by_every_policy(policy, fallbacks):
    accurate = planned(schedulingPolicy=policy).stages[0]
    cheap = planned(400.0, objective={"costWeight": 100.0}, schedulingPolicy=policy).stages[0]

    assert (accurate.operating_point, accurate.upgrades) == ("full", ())
    assert [point.name for point in accurate.fallbacks] == fallbacks
    assert (cheap.operating_point, cheap.fallbacks) == ("half", ())
    assert [point.name for point in cheap.upgrades] == ["full"]


def test_a_pinned_point_is_the_only_one():
    assert names(planned(stage={"pin": {"operatingPoint": "half"}})) == ["half"]


@pytest.mark.parametrize(
    ("third", "law", "why"),
    [
        ({"accuracy": 0.8}, (0.004, 0.003), "half is as accurate and as fast: 20 ms against 28 ms at batch 8"),
        ({"accuracy": 0.7}, (0.004, 0.002), "half is as accurate and as fast: 20 ms against 20 ms at batch 8"),
        ({"accuracy": 0.7}, None, "not profiled with 1 cores"),
        ({"accuracy": 0.7}, (0.004, 0.001), ""),
        ({"accuracy": 0.7, "modalities": ["x"]}, (0.004, 0.003), ""),
        ({"accuracy": 0.7, "accuracyByTask": {"crops": {"value": 0.95}}}, (0.004, 0.003), ""),
    ],
    ids=["slower", "less accurate", "not measured", "faster", "reads less", "better at a task"],
)
def test_dominated_points_are_excluded_with_the_reason(third, law, why):
    seconds = SECONDS | ({"third": law} if law else {})
    plan = planned(points=[*POINTS, third | {"name": "third"}], seconds=seconds, stage={"batchSizes": [8]})

    assert ("third" in names(plan)) is not bool(why)
    assert [why in reason for reason in plan.explanation.excluded_points] == [True] * bool(why)


def test_capacity_uses_fastest_point_for_peak_and_planned_point():
    """At batch 8 a replica serves 66.7 rows a second at full and 400 at half; of 300 at peak 269 keep coming."""
    falls_back = planned(300.0, stage={"batchSizes": [8]}, objective={"accuracyWeight": 1000.0}).stages[0]
    keeps = planned(
        300.0, stage={"batchSizes": [8]}, objective={"accuracyWeight": 1000.0}, schedulingPolicy="EarliestDeadlineFirst"
    ).stages[0]

    assert falls_back.operating_point == keeps.operating_point == "full"
    assert sustained_load_rps(330.0, 20.0) < 0.8 * 66.7 * falls_back.replicas < 330.0
    assert 0.8 * 66.7 * keeps.replicas >= 330.0
    assert falls_back.throughput_rps == pytest.approx(falls_back.replicas * 400.0)


def test_in_overload_the_fastest_point_says_how_much_is_carried():
    small = {"budget": {"cores": "1"}, "stage": {"batchSizes": [8]}}
    falls_back, keeps = planned(1000.0, **small), planned(1000.0, **small, schedulingPolicy="EarliestDeadlineFirst")

    assert falls_back.planned_fraction == keeps.planned_fraction == pytest.approx(0.8 * 400 / 1100, rel=0.05)
    assert names(falls_back) == ["full", "half"]


def test_lower_bound_basis_plans_the_better_proven_point():
    proven = {"source": "Measured", "samples": 10_000, "low": 0.89, "high": 0.91}
    thin = {"source": "Measured", "samples": 20, "low": 0.7, "high": 0.99}
    points = [
        {"name": "full", "accuracy": 0.92, "accuracyEvidence": thin},
        {"name": "half", "accuracy": 0.9, "accuracyEvidence": proven},
    ]
    by_value = planned(points=points, objective={"accuracyWeight": 1000.0})
    by_bound = planned(points=points, objective={"accuracyWeight": 1000.0, "accuracyBasis": "LowerBound"})

    assert (by_value.stages[0].operating_point, by_value.expected.accuracy) == ("full", 0.92)
    assert (by_bound.stages[0].operating_point, by_bound.expected.accuracy) == ("half", 0.89)
    assert names(by_bound) == ["half"]
    assert by_value.explanation.accuracy_basis == "as declared or measured, without their intervals"
    assert by_bound.explanation.accuracy_basis == "lower bounds of 95 % intervals"


def test_accuracy_without_interval_counts_by_value_and_is_named():
    plan = planned(objective={"accuracyBasis": "LowerBound", "accuracyFloor": 0.85, "goal": "MinCost"})

    assert (plan.reason, plan.expected.accuracy) == ("Optimal", 0.9)
    assert plan.explanation.accuracy_basis.endswith("values without an interval: only: small")


@pytest.mark.parametrize("basis", ["Expected", "LowerBound"])
def test_agreement_accuracies_are_named_in_the_plan(basis):
    agreeing = {"source": "Agreement", "samples": 100, "low": 0.9, "high": 1.0}
    points = [{"name": "full", "accuracy": 0.95, "accuracyEvidence": agreeing}]
    basis_text = planned(points=points, objective={"accuracyBasis": basis}).explanation.accuracy_basis

    assert "agreement with a heavier model" in basis_text


def test_a_floor_is_kept_at_the_lower_end():
    evidence = {"source": "Measured", "low": 0.84, "high": 0.95}
    points = [POINTS[0] | {"accuracyEvidence": evidence}]
    plan = planned(points=points, objective={"accuracyBasis": "LowerBound", "accuracyFloor": 0.85, "goal": "MinCost"})

    assert plan.reason.startswith("objective.accuracyFloor 0.85 cannot be reached")


def test_policy_traits_match_the_scheduling_policies():
    for name in ("EarliestDeadlineFirst", "SlackFit", "ModalityMix", "TokenAdaptive"):
        policy = POLICIES[name]
        assert a_pipeline(schedulingPolicy=name).spec.policy_traits.uses_fallbacks is policy.uses_fallbacks
