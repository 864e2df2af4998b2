"""Escalations in a plan: those the router may take, invalid ones, and the expected accuracy of the mix it serves."""

from contextlib import nullcontext

import pytest

from tests.adapter.test_allowed_points import INPUTS, SECONDS, planned
from tests.builders import a_pipeline, a_stage, a_variant
from trimtab_adapter.planning.explain import describe_option
from trimtab_adapter.planning.latency import sustained_load_rps
from trimtab_pipelines.profiling import profile_tasks
from trimtab_pipelines.shadow_price import BUSY_SHARE, row_options

OUTPUTS = [{"name": "y", "datatype": "FP32", "shape": [4]}, {"name": "sure", "datatype": "FP32"}]
ESCALATION = {
    "to": "full",
    "confidenceBelow": 0.6,
    "share": 0.25,
    "accuracy": 0.89,
    "accuracyLow": 0.87,
    "samples": 2000,
}
POINTS = [
    {"name": "full", "accuracy": 0.9, "accuracyEvidence": {"low": 0.885}},
    {"name": "half", "accuracy": 0.8, "accuracyEvidence": {"low": 0.785}, "escalations": [ESCALATION]},
]
STAGE = {"outputs": OUTPUTS, "confidence": "sure"}
BUSY = {"objective": {"goal": "MaxAccuracy"}, "budget": {"cores": "1"}}


def expecting(load_rps, **spec):
    """The plan of one core whose cheap point may escalate its least confident quarter."""
    return planned(load_rps, points=POINTS, stage=STAGE, **{"schedulingPolicy": "ModalityMix"} | BUSY | spec)


def looking(load_rps, **spec):
    return expecting(load_rps, **spec).stages[0]


def test_escalation_is_planned_if_the_best_point_is_too_slow():
    """A core carries 67 rows a second at the best point and 400 at the cheap one: what is between, with a share."""
    calm, busy, busiest = (looking(load) for load in (20.0, 100.0, 250.0))

    assert (calm.operating_point, calm.planned_escalation) == ("full", None)
    assert busy.operating_point == "half"
    assert busy.planned_escalation is not None
    assert busy.planned_escalation.to == "full"
    assert busy.expected_accuracy == 0.89
    assert describe_option(busy) == "small/half, 25 % escalated to full ×1 batch 8"
    assert (busiest.operating_point, busiest.planned_escalation) == ("half", None)


def test_router_may_use_every_escalation_at_any_plan():
    assert [(point.name, len(point.escalations)) for point in looking(20.0).points] == [("full", 0), ("half", 1)]
    assert [(point.name, len(point.escalations)) for point in looking(250.0).points] == [("full", 0), ("half", 1)]


@pytest.mark.parametrize("policy", ["SlackFit", "EarliestDeadlineFirst"])
def test_policies_without_escalation_plan_none(policy):
    stage = looking(100.0, schedulingPolicy=policy)

    assert stage.planned_escalation is None
    assert not any(point.escalations for point in stage.points)


def test_lower_bound_basis_uses_the_escalation_floor():
    sure = {"goal": "MaxAccuracy", "accuracyBasis": "LowerBound"}
    assert looking(100.0, objective=sure).expected_accuracy == 0.87


def test_row_options_include_escalations():
    stage = looking(100.0)
    full, half = (SECONDS[name][0] / 8 + SECONDS[name][1] for name in ("full", "half"))

    assert row_options(stage)[-1][:2] == pytest.approx((half + 0.25 * full, 0.89))


@pytest.mark.parametrize(
    ("escalation", "stage", "message"),
    [
        (ESCALATION, {"outputs": OUTPUTS}, "confidence"),
        (ESCALATION | {"to": "half"}, STAGE, "'half'.*full"),
        (ESCALATION | {"to": "other"}, STAGE, "'other'.*full"),
    ],
)
def test_impossible_escalation_is_rejected(escalation, stage, message):
    points = [POINTS[0], POINTS[1] | {"escalations": [escalation]}]
    with pytest.raises(ValueError, match=message):
        planned(points=points, stage=stage)


@pytest.mark.parametrize(
    ("escalation", "other", "message"),
    [
        ({"variant": "large", "to": "default"}, {}, None),
        ({"variant": "other", "to": "default"}, {}, "variant 'other'.*large"),
        ({"variant": "large", "to": "full"}, {}, "'full'.*variant large are: default"),
        ({"variant": "large", "to": "default"}, {"resources": {"cpu": 2}}, None),
    ],
)
def test_escalation_goes_to_a_variant_of_the_stage(escalation, other, message):
    variants = [a_variant(escalations=[ESCALATION | escalation]), a_variant("large", **other)]
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        stage = a_pipeline([a_stage("only", variants=variants) | STAGE]).spec.stages[0]
        planned_escalation = stage.variants[0].points[0].planned_escalations("Expected")[0]

        assert planned_escalation.target("small") == ("large", "default")
        assert str(planned_escalation) == "25 % escalated to large"


def test_escalations_keep_the_profile_fingerprint():
    def fingerprint(points):
        one = a_stage("only", inputs=INPUTS, variants=[a_variant(operatingPoints=points)]) | STAGE
        inputs = [{"name": name, "datatype": "FP32", "shape": [4], "optional": name == "z"} for name in "xz"]
        return profile_tasks(a_pipeline([one], inputs=inputs))[0].fingerprint

    bare = [POINTS[0], {"name": "half", "accuracy": 0.8}]
    assert fingerprint(POINTS) == fingerprint(bare)


def test_spare_seconds_raise_the_expected_accuracy():
    """One core: 67 rows a second at the best point, 160 with a quarter escalated, 400 at the cheap one."""
    expected = [expecting(load).expected.accuracy for load in (5.0, 20.0, 60.0, 100.0, 150.0, 250.0)]
    chosen = [expecting(load).stages[0].expected_accuracy for load in (5.0, 20.0, 60.0, 100.0, 150.0, 250.0)]

    assert expected[0] == expected[1] == 0.9, "both can have the best point"
    assert sorted(expected, reverse=True) == expected, "more load leaves less"
    assert all(mix >= point for mix, point in zip(expected, chosen, strict=True))
    assert chosen[-1] < expected[-1] < 0.89, "half the rows have time for an escalation"


def test_expectation_is_the_best_mix_at_the_sustained_load():
    plan = expecting(250.0)
    rows_rps = sustained_load_rps(1.1 * 250.0, 20.0)
    half, full = (constant / 8 + linear for constant, linear in (SECONDS["half"], SECONDS["full"]))
    seconds = BUSY_SHARE * plan.stages[0].replicas / rows_rps

    assert plan.stages[0].batch_size == 8
    assert plan.expected.accuracy == pytest.approx(0.8 + (0.89 - 0.8) * (seconds - half) / (0.25 * full), abs=0.01)


@pytest.mark.parametrize("policy", ["EarliestDeadlineFirst", "SlackFit"])
def test_policies_without_mixing_expect_the_planned_point(policy):
    plan = expecting(250.0, schedulingPolicy=policy)

    assert plan.expected.accuracy == plan.stages[0].expected_accuracy == 0.8


def test_points_slower_than_the_slo_are_not_expected():
    plan = expecting(5.0, slo={"latency": "30ms"})

    assert plan.stages[0].operating_point == "half"
    assert plan.expected.accuracy == 0.8
