"""Profiles answer with what was measured, and with the fit in between."""

import pytest

from tests.builders import a_point_profile, a_profile
from trimtab_pipelines.verdict import Outcome, bar


def test_a_measured_batch_answers_for_itself_and_others_by_the_fit():
    point = a_point_profile(constant_seconds=0.01, linear_seconds=0.001)

    assert point.latency_seconds(8) == pytest.approx(0.018)
    assert point.latency_seconds(12) == pytest.approx(0.022)
    assert point.throughput_rps(10) == pytest.approx(10 / 0.02)


def test_a_profile_finds_its_points_by_variant_point_and_cores():
    profile = a_profile("first", [a_point_profile("small"), a_point_profile("small", cores=2)]).spec

    assert profile.point("small", "default", 2) == profile.points[1]
    assert profile.point("small", "default", 4) is None
    assert profile.point("large", "default", 1) is None


def test_an_outcome_holds_when_every_bar_does():
    kept, missed = bar("p99", 0.3, "<=", 0.5), bar("accuracy", 0.8, ">=", 0.9)

    assert Outcome(name="bench", figures={}, bars=(kept,)).holds
    assert not Outcome(name="bench", figures={}, bars=(kept, missed)).holds
    assert missed.bound == ">= 0.9"
