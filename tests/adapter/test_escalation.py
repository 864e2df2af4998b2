"""Escalations in a plan: their expected accuracy, those the router may take, and invalid specifications."""

import pytest

from tests.adapter.test_allowed_points import INPUTS, SECONDS, planned
from tests.builders import a_pipeline, a_stage, a_variant
from trimtab_adapter.planning.explain import describe_option
from trimtab_pipelines.profiling import profile_tasks
from trimtab_pipelines.shadow_price import row_options

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


def looking(load_rps, **spec):
    return planned(load_rps, points=POINTS, stage=STAGE, **{"schedulingPolicy": "ModalityMix"} | BUSY | spec).stages[0]


def test_escalation_is_planned_if_the_best_point_is_too_slow():
    """A core carries 67 rows a second at the best point and 400 at the cheap one: what is between, with a share."""
    calm, busy, busiest = (looking(load) for load in (20.0, 100.0, 250.0))

    assert (calm.operating_point, calm.planned_escalation) == ("full", None)
    assert busy.operating_point == "half"
    assert busy.planned_escalation is not None
    assert busy.planned_escalation.to == "full"
    assert busy.expected_accuracy == 0.89
    assert describe_option(busy) == "small/half > full 25 % ×1 batch 8"
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

    assert row_options(stage)[-1] == pytest.approx((half + 0.25 * full, 0.89))


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


def test_escalations_keep_the_profile_fingerprint():
    def fingerprint(points):
        one = a_stage("only", inputs=INPUTS, variants=[a_variant(operatingPoints=points)]) | STAGE
        inputs = [{"name": name, "datatype": "FP32", "shape": [4], "optional": name == "z"} for name in "xz"]
        return profile_tasks(a_pipeline([one], inputs=inputs))[0].fingerprint

    bare = [POINTS[0], {"name": "half", "accuracy": 0.8}]
    assert fingerprint(POINTS) == fingerprint(bare)
