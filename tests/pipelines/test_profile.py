"""Profiles: measured latencies, and fitted ones in between."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy import cumprod

from tests.builders import a_measured_profile, a_point_profile, a_profile
from trimtab_pipelines.result_line import ResultLine, threshold


def test_unmeasured_batch_size_uses_the_fit():
    point = a_point_profile(constant_seconds=0.01, linear_seconds=0.001)

    assert point.latency_seconds(8) == pytest.approx(0.018)
    assert point.latency_seconds(12) == pytest.approx(0.022)
    assert point.throughput_rps(10) == pytest.approx(10 / 0.02)


def test_profile_point_lookup():
    profile = a_profile("first", [a_point_profile("small"), a_point_profile("small", cores=2)]).spec

    assert profile.point("small", "default", 2) == profile.points[1]
    assert profile.point("small", "default", 4) is None
    assert profile.point("large", "default", 1) is None


def test_result_holds_if_every_threshold_holds():
    kept, missed = threshold("p99", 0.3, "<=", 0.5), threshold("accuracy", 0.8, ">=", 0.9)

    assert ResultLine(name="bench", figures={}, bars=(kept,)).holds
    assert not ResultLine(name="bench", figures={}, bars=(kept, missed)).holds
    assert missed.bound == ">= 0.9"


def test_downward_fit_is_bounded_by_the_largest_measurement():
    point = a_measured_profile({1: 0.010, 2: 0.014, 4: 0.020, 8: 0.028})
    sizes = range(1, 129)

    assert point.fit.seconds(64) < 0
    assert point.latency_seconds(64) >= point.latency_seconds(8)
    assert point.throughput_rps(64) <= 8 / 0.028 * 1.01
    for quantile in (0.5, 0.99):
        seconds = [point.latency_seconds(size, quantile) for size in sizes]
        assert seconds == sorted(seconds)
    assert all(point.throughput_rps(size) <= 8 / 0.028 * (1 + 1e-9) for size in sizes)


RISING = st.lists(st.floats(1.0, 3.0), min_size=2, max_size=7)


@given(steps=RISING, first=st.floats(1e-4, 1.0), skipped=st.integers(0, 3))
def test_unmeasured_size_lies_between_its_neighbours(steps, first, skipped):
    sizes = [2 ** (place + skipped) for place in range(len(steps))]
    point = a_measured_profile(dict(zip(sizes, (first * float(step) for step in cumprod(steps)), strict=True)))
    best_rps = max(one.throughput_rps for one in point.measurements)

    seconds = [point.latency_seconds(size) for size in range(1, 3 * sizes[-1])]
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(seconds[sizes[0] - 1 :]))
    assert min(seconds) > 0
    assert max(seconds[: sizes[0]]) <= point.latency_seconds(sizes[0])
    assert all(0 < point.throughput_rps(size) <= best_rps * (1 + 1e-9) for size in range(1, 3 * sizes[-1]))
