"""Fit of the latency law: recovers it from exact data, and is never negative between measured sizes."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab_profiler.fit import fit_latency

SIZES = (1, 2, 4, 8, 16, 32, 64)


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 1e-4), st.floats(0, 1e-2), st.floats(1e-4, 1e-1))
def test_fit_recovers_a_law_from_its_values(quadratic: float, linear: float, constant: float) -> None:
    fit = fit_latency(SIZES, [(quadratic * b + linear) * b + constant for b in SIZES])

    assert fit.mean_relative_error < 1e-6
    for size in (1, 3, 24, 64):
        assert fit.seconds(size) == pytest.approx((quadratic * size + linear) * size + constant, rel=1e-5)


def test_small_batches_weigh_as_much_as_large_ones() -> None:
    """Plain least squares would miss batch 1 by far to win a little at batch 64."""
    measured = [0.010, 0.011, 0.013, 0.017, 0.030, 0.070, 0.250]
    fit = fit_latency(SIZES, measured)

    plain = np.polynomial.Polynomial.fit(SIZES, measured, 2).convert()
    plain_error = np.mean([abs(plain(b) / m - 1) for b, m in zip(SIZES, measured, strict=True)])
    assert fit.mean_relative_error < plain_error


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1e-4, 10), min_size=1, max_size=7))
def test_no_fit_is_negative_between_the_measured_sizes(latencies: list[float]) -> None:
    sizes = SIZES[: len(latencies)]
    fit = fit_latency(sizes, latencies)

    assert all(fit.seconds(size) > 0 for size in np.linspace(1, sizes[-1], 100))
    assert np.isfinite(fit.mean_relative_error)


def test_one_and_two_sizes_give_a_constant_and_a_line() -> None:
    assert fit_latency([4], [0.02]).seconds(9) == pytest.approx(0.02)
    assert fit_latency([1, 3], [0.02, 0.04]).seconds(5) == pytest.approx(0.06)


def test_latency_may_fall_with_the_batch() -> None:
    fit = fit_latency([1, 2, 4], [0.030, 0.025, 0.020])

    assert fit.mean_relative_error < 1e-9


@pytest.mark.parametrize(
    ("sizes", "latencies", "message"),
    [
        ([], [], "0 batch sizes and 0 latencies; give one latency for each, at least one"),
        ([1, 2], [0.1], "2 batch sizes and 1 latencies"),
        ([1, 1], [0.1, 0.1], "batch sizes [1, 1] must be distinct and at least 1"),
        ([1, 2], [0.1, 0.0], "latencies [0.1, 0.0] must be above 0 and finite"),
        ([1], [float("nan")], "must be above 0 and finite"),
    ],
)
def test_invalid_points_are_rejected(sizes, latencies, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        fit_latency(sizes, latencies)
