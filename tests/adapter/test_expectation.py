"""Expected accuracy of a plan: that of the mix that the router serves, not of the planned point."""

import pytest

from tests.adapter.test_allowed_points import SECONDS, planned
from tests.adapter.test_escalation import POINTS, STAGE
from trimtab_adapter.planning.latency import sustained_load_rps
from trimtab_pipelines.shadow_price import BUSY_SHARE

ONE_CORE = {"objective": {"goal": "MaxAccuracy"}, "budget": {"cores": "1"}}


def expecting(load_rps, **spec):
    """The plan of one core whose cheap point may escalate its least confident quarter."""
    asked = {"schedulingPolicy": "ModalityMix"} | ONE_CORE | spec
    return planned(load_rps, points=POINTS, stage=STAGE, **asked)


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
