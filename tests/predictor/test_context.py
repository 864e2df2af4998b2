"""Seasonal context of a forecast: recurring changes, usual rates, and the history that stores them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from trimtab_predictor.context import MEMORY_SECONDS, PERIODS_SECONDS, Context, load_context, peak_changes
from trimtab_predictor.forecaster import smape
from trimtab_predictor.load_history import BIN_SECONDS, LoadHistory, seconds_of_bins
from trimtab_predictor.lstm import LstmForecaster, LstmWeights
from trimtab_router.observability.arrivals import KEPT_SECONDS

HOUR = 3600


def jumping(seconds: int, every: int = HOUR, at: int = 1000, times: float = 2.0) -> NDArray[np.float64]:
    """Draw 60 requests a second that are so many times as many for five seconds in every hour."""
    rates = np.full(seconds, 60.0)
    for start in range(at, seconds, every):
        rates[start : start + 5] *= times
    return np.random.default_rng(3).poisson(rates).astype(np.float64)


def one(rps: NDArray[np.float64], moment: int) -> Context:
    return load_context(rps, np.array([moment]))


def test_peak_change_compares_20_seconds_before_and_after() -> None:
    load = np.concatenate([np.full(30, 10.0), np.full(30, 30.0)])

    found = peak_changes(load)

    assert found.size == 61
    assert found[20] == found[30] == pytest.approx(0.5)  # the step comes within the 20 seconds after
    assert found[31] == pytest.approx(0.0)  # and lies within the 20 seconds before
    assert np.isfinite(found).nonzero()[0].tolist() == list(range(20, 41))


def test_change_is_zero_without_load_and_unknown_in_gaps() -> None:
    load = np.zeros(100)
    load[70] = np.nan

    found = peak_changes(load)

    assert found[20:51].tolist() == [0.0] * 31
    assert np.isnan(found[51:]).all()
    assert np.isnan(peak_changes(np.ones(39))).all()


def test_hourly_change_is_expected_again() -> None:
    load = jumping(5 * HOUR + 990)

    recurring = one(load, load.size).recurring[0]

    hourly, longest = recurring[-1], PERIODS_SECONDS[-1]
    assert longest == HOUR
    assert 0.15 < hourly < 1 / 3  # twice as much is a change of 1/3, five hours and one without make it 5/6 of that
    assert (np.abs(recurring[:-1]) < hourly / 1.5).all()  # most of the five-minute marks showed nothing


def test_gaps_are_excluded_from_the_mean() -> None:
    load = np.tile(np.concatenate([np.full(HOUR // 2, 10.0), np.full(HOUR // 2, 30.0)]), 3)

    known = one(load, 2 * HOUR + HOUR // 2).recurring[0, -1]
    load[HOUR // 2 - 5] = np.nan
    without_first = one(load, 2 * HOUR + HOUR // 2).recurring[0, -1]

    assert known == pytest.approx(2 * 0.5 / 3)
    assert without_first == pytest.approx(0.5 / 2)
    assert one(load, 200).recurring.tolist() == [[0.0] * 4]


def test_usual_load_averages_ten_and_thirty_minutes() -> None:
    load = np.concatenate([np.full(1200, 40.0), np.tile([8.0, 12.0], 300)])
    load[1500] = np.nan

    found = one(load, load.size)

    assert found.means_rps[0] == pytest.approx([np.nanmean(load[1200:]), np.nanmean(load)])
    assert found.deviations_rps[0] == pytest.approx([np.nanstd(load[1200:]), np.nanstd(load)])
    assert found.known == pytest.approx([1799 / 1800])
    assert one(load, 450).known == pytest.approx([0.25])


@given(st.lists(st.one_of(st.floats(0, 1e9), st.just(np.nan)), max_size=90), st.integers(0, 90))
def test_any_load_has_a_finite_context(rps: list[float], moment: int) -> None:
    load = np.array(rps, dtype=np.float64)

    found = one(load, min(moment, load.size))

    for part in (found.recurring, found.means_rps, found.deviations_rps, found.known):
        assert np.isfinite(part).all()
    assert (np.abs(found.recurring) <= 1).all()
    assert (found.deviations_rps >= 0).all()


@pytest.mark.parametrize("every", [900, 1800, HOUR])
def test_jumps_at_clock_marks_are_forecast_from_earlier_ones(every: int) -> None:
    load = jumping(7 * HOUR, every)
    at_the_mark = np.array([now for now in range(5 * HOUR, load.size - 100) if (1000 - now) % every in range(1, 13)])
    network = LstmForecaster(LstmWeights.load())

    def error(seen: int) -> float:
        said = [network.forecast(load[max(now - seen, 0) : now], float(now)).peak_rps for now in at_the_mark]
        return smape(said, [load[now : now + 20].max() for now in at_the_mark])

    assert error(MEMORY_SECONDS) < 0.6 * error(600)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), min_size=1, max_size=12))
def test_history_keeps_the_newest_value_of_each_second(looks: list[tuple[int, int]]) -> None:
    history, known, now = LoadHistory(), dict[int, float](), 1000

    for number, (passed, size) in enumerate(looks):
        now += passed
        remembered = history.extend(np.full(size, float(number)), now + 0.9)
        known.update(dict.fromkeys(range(now - size, now), float(number)))

        expected = [known.get(second, np.nan) for second in range(now - remembered.size, now)]
        np.testing.assert_array_equal(remembered, expected)
        assert remembered.size >= now - min(known, default=now)


def test_clock_set_back_resets_the_history() -> None:
    history = LoadHistory()
    history.extend(np.array([1.0, 2.0, 3.0]), 100.0)

    assert history.extend(np.array([5.0, 6.0]), 101.0).tolist() == [1.0, 2.0, 5.0, 6.0]
    assert history.extend(np.array([6.5]), 101.9).tolist() == [1.0, 2.0, 5.0, 6.5]
    assert history.extend(np.arange(9.0), 101.0).tolist() == list(range(9))
    assert history.extend(np.array([4.0]), 50.0).tolist() == [4.0]
    assert history.extend(np.array([5.0]), 50.0 + MEMORY_SECONDS).tolist() == [5.0]


def test_router_history_covers_the_forecast_window() -> None:
    history = LoadHistory()
    history.extend(np.ones(MEMORY_SECONDS), 0.0)

    kept = history.extend(np.full(700, 2.0), 600.0)

    assert kept.size == MEMORY_SECONDS <= KEPT_SECONDS
    assert (kept == 2.0).sum() == 700


BINS = st.lists(
    st.tuples(st.floats(0, 1e6), st.floats(0, 1)).map(lambda pair: (pair[0], pair[0] * max(pair[1], 0.1))), min_size=1
)


@given(BINS)
def test_peak_and_mean_are_kept(bins: list[tuple[float, float]]) -> None:
    rebuilt = seconds_of_bins(bins).reshape(-1, BIN_SECONDS)

    np.testing.assert_allclose(rebuilt.max(axis=1), [peak for peak, _ in bins], rtol=1e-9)
    np.testing.assert_allclose(rebuilt.mean(axis=1), [mean for _, mean in bins], rtol=1e-6, atol=1e-9)
    assert (rebuilt >= 0).all()


def test_seconds_vary_as_arrivals_do() -> None:
    load = np.random.default_rng(1).poisson(50.0, 10_000).astype(np.float64).reshape(-1, BIN_SECONDS)

    rebuilt = seconds_of_bins(zip(load.max(axis=1), load.mean(axis=1), strict=True))

    assert rebuilt.std() == pytest.approx(load.std(), rel=0.1)
