"""Profiles: measured latencies, and fitted ones in between."""

from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy import cumprod
from pydantic import ValidationError

from tests.builders import a_chat_point, a_measured_profile, a_point_profile, a_profile
from trimtab_pipelines.profile import LatencyCurve, PointProfile, prefill_seconds
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


def test_duplicate_batch_size_is_rejected():
    curve = a_point_profile()
    twice = {"measurements": curve.measurements[:1] * 2, "fit": curve.fit}

    for build in (LatencyCurve, partial(PointProfile, variant="small", cores=1)):
        with pytest.raises(ValidationError, match="duplicate batchSize"):
            build(**twice)


def test_extrapolation_may_exceed_the_bounds_of_documents():
    text = a_point_profile(constant_seconds=1.0, linear_seconds=0.0)
    image = a_point_profile(constant_seconds=1e9, linear_seconds=0.0)
    curves = [LatencyCurve(measurements=point.measurements, fit=point.fit) for point in (text, image)]

    assert curves[0].interpolate(curves[1], 8).measurements[0].latency_seconds_p50 > 1e9


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


def a_chat_profile() -> PointProfile:
    """Whole answers to chats with an image take 8 + 4b ms, without 4 + 2b; they begin after half of it."""
    return a_chat_point("whole", (0.008, 0.004), (0.004, 0.002), (0.004, 0.002), (0.002, 0.001), tokens=3.0)


@given(images=st.floats(0, 16), size=st.sampled_from([1, 4, 8, 3]))
def test_chat_times_are_linear_in_images(images, size):
    shown = a_chat_profile().for_chats(images)

    expected = (1 + images) * (0.004 + 0.002 * size)
    assert shown.latency_seconds(size) == pytest.approx(expected)
    assert shown.to_first_token.latency_seconds(size) == pytest.approx(expected / 2)
    assert shown.throughput_rps(size) == pytest.approx(size / expected)
    assert shown.for_chats(images).chats is not None


def test_inverted_measurements_do_not_extrapolate_to_a_gain():
    slow, fast = a_point_profile("whole", 0.008, 0.004), a_point_profile("whole", 0.004, 0.002)
    one, none = (LatencyCurve(measurements=each.measurements, fit=each.fit) for each in (fast, slow))

    assert none.interpolate(one, 16.0).measurements[0].latency_seconds_p50 == fast.latency_seconds(1, 0.5)
    assert a_point_profile().for_chats(3.0) == a_point_profile()
    assert a_point_profile().to_first_token == a_point_profile()


READING = {10: 0.002, 110: 0.012}


def a_profile_that_tells_of_prompts() -> PointProfile:
    """Ten tokens of words and sixteen of an image; a tenth of a millisecond a token beyond ten."""
    own = a_chat_profile()
    assert own.chats is not None
    changes = {"prompt_tokens": 26.0, "text_prompt_tokens": 10.0, "prefill_seconds": READING}
    return own.replace(chats=own.chats.replace(**changes))


@given(images=st.floats(0, 8), size=st.sampled_from([1, 4, 8]), more=st.floats(0, 5_000))
def test_extra_prompt_tokens_add_prefill_time_per_chat(images, size, more):
    profile = a_profile_that_tells_of_prompts()
    usual = profile.for_chats(images)
    longer = profile.for_chats(images, 10.0 + 16.0 * images + more)

    extra = 0.0001 * more
    assert longer.latency_seconds(size) == pytest.approx(usual.latency_seconds(size) + size * extra)
    assert longer.to_first_token.latency_seconds(size) == pytest.approx(
        usual.to_first_token.latency_seconds(size) + size * extra
    )
    assert longer.throughput_rps(size) == pytest.approx(1 / (1 / usual.throughput_rps(size) + extra))


@pytest.mark.parametrize("tokens", [0.0, 5.0, 42.0])
def test_fewer_or_unknown_tokens_cost_as_profiled(tokens):
    profile = a_profile_that_tells_of_prompts()

    assert profile.for_chats(2.0, tokens) == profile.for_chats(2.0)
    assert a_chat_profile().for_chats(2.0, 9_000.0) == a_chat_profile().for_chats(2.0)


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (10, 1.0), (15, 1.5), (30, 4.0), (40, 6.0), (60, 10.0)])
def test_prefill_seconds_interpolate_and_extrapolate(tokens, seconds):
    assert prefill_seconds({10: 1.0, 20: 2.0, 40: 6.0}, tokens) == pytest.approx(seconds)
    assert prefill_seconds({}, tokens) == 0.0
    assert prefill_seconds({20: 3.0}, tokens) == 3.0
