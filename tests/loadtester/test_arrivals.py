"""Arrivals: one Poisson process over the whole load, without bunching within seconds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab_loadtester.arrivals import poisson_arrivals


def test_counts_have_poisson_variance() -> None:
    """Variance over mean of counts is 1 in windows far shorter than a second, of a second, and of ten.

    IPA's tester bunches requests into the first 1/rate of each second, which the shortest windows would show.
    """
    arrivals = poisson_arrivals(np.full(4000, 25.0), seed=7)

    for window in (0.1, 1.0, 10.0):
        counts = np.histogram(arrivals, bins=np.arange(0, 4000 + window / 2, window))[0]
        spread = 5 * np.sqrt(2 / counts.size)
        assert abs(counts.var() / counts.mean() - 1) < spread


def test_gaps_are_exponential_and_uncorrelated() -> None:
    gaps = np.diff(poisson_arrivals(np.full(2000, 25.0), seed=3))

    assert gaps.mean() == pytest.approx(1 / 25, rel=0.02)
    assert gaps.std() == pytest.approx(1 / 25, rel=0.03)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.02


def test_counts_follow_the_rate_of_each_second() -> None:
    rates = np.concatenate([np.full(500, 5.0), np.full(500, 40.0), np.zeros(100), np.full(300, 15.0)])
    counts = np.histogram(poisson_arrivals(rates, seed=1), bins=np.arange(rates.size + 1))[0]

    assert counts[:500].sum() == pytest.approx(2500, abs=5 * 50)
    assert counts[500:1000].sum() == pytest.approx(20000, abs=5 * 142)
    assert counts[1000:1100].sum() == 0
    assert counts[1100:].sum() == pytest.approx(4500, abs=5 * 67)


def test_rates_may_hold_for_minutes() -> None:
    rates = np.array([2.0, 0.0, 8.0])
    by_minute = poisson_arrivals(rates, seed=1, interval_seconds=60.0)

    assert np.allclose(by_minute, poisson_arrivals(np.repeat(rates, 60), seed=1))
    with pytest.raises(ValueError, match="rate of second 120 is -1"):
        poisson_arrivals(np.array([1.0, 1.0, -1.0]), seed=1, interval_seconds=60.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 300), max_size=30), st.integers(0, 2**32), st.floats(0.1, 40))
def test_arrivals_ascend_and_skip_empty_seconds(rates: list[float], seed: int, duration: float) -> None:
    arrivals = poisson_arrivals(np.array(rates), seed, duration)

    assert np.all(np.diff(arrivals) >= 0)
    assert np.all((arrivals >= 0) & (arrivals < max(min(duration, len(rates)), 1e-9)))
    assert all(rates[int(second)] > 0 for second in arrivals)
    assert np.array_equal(arrivals, poisson_arrivals(np.array(rates), seed, duration))


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_invalid_rate_is_rejected(rate: float) -> None:
    with pytest.raises(ValueError, match=r"rate of second 1 is .*; rates must be finite and at least 0"):
        poisson_arrivals(np.array([1.0, rate]), seed=0)


def test_too_many_requests_are_rejected() -> None:
    with pytest.raises(ValueError, match="the load amounts to 100000000 requests; at most 20000000"):
        poisson_arrivals(np.full(100, 1e6), seed=0)
