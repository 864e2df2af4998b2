"""Forecasters: one signature, reported reasons, and missing metrics distinct from no load."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from trimtab_predictor.fallback_forecaster import (
    MAX_WIDENING,
    MIN_FORECASTS,
    FallbackForecaster,
    shipped_forecaster,
    widening_factor,
)
from trimtab_predictor.forecaster import Forecast, Forecaster, HistoryError, OracleForecaster, ReactiveForecaster, smape
from trimtab_predictor.lstm import LstmForecaster, LstmWeights
from trimtab_predictor.trace import Trace

TRACE = Trace(np.arange(1.0, 601.0), "ramp")
ALL: dict[str, Forecaster] = {
    "reactive": ReactiveForecaster(),
    "oracle": OracleForecaster(TRACE),
    "lstm": LstmForecaster(LstmWeights.load()),
    "fallback": shipped_forecaster(),
}


class Saying(LstmForecaster):
    """A network whose forecast is the window's mean times `ratio`, with quantiles so many times as far up."""

    def __init__(self, ratio: float, p90: float = 1.1) -> None:
        super().__init__(LstmWeights.load())
        self._ratio, self._p90 = ratio, p90

    def forecast(self, history_rps: ArrayLike, now_seconds: float) -> Forecast:  # noqa: ARG002 - the shared signature
        peak = float(np.mean(np.asarray(history_rps)[-120:])) * self._ratio
        return Forecast(peak, "lstm", "asked for", quantiles=((0.5, peak), (0.9, peak * self._p90)))


def level_load(seconds: int, rps: float = 10.0) -> NDArray[np.float64]:
    return np.full(seconds, rps)


def test_smape_is_computed_pair_by_pair() -> None:
    # (10, 8): 2·2/18; (0, 0): 0; (3, 0): 2; (5, 5): 0.
    assert smape([10, 0, 3, 5], [8, 0, 0, 5]) == pytest.approx((4 / 18 + 0 + 2 + 0) / 4)


@pytest.mark.parametrize(("forecast", "actual"), [([1.0, 2.0], [[1.0], [2.0]]), ([1.0], [1.0, 2.0]), ([], [])])
def test_smape_never_compares_all_pairs(forecast: list[float], actual: list[float]) -> None:
    with pytest.raises(ValueError, match="SMAPE needs two equally long rows"):
        smape(forecast, actual)


@pytest.mark.parametrize("name", ALL)
def test_forecast_names_its_source(name: str) -> None:
    forecast = ALL[name].forecast(level_load(200), 100.0)

    assert forecast.peak_rps > 0
    assert forecast.source == ("lstm" if name == "fallback" else name)
    assert forecast.is_measured


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("history", "message"),
    [
        ([5.0, -1.0, 5.0], "holds -1 requests in the second 2 s ago; 0 to 1e"),
        ([5.0, float("inf")], "holds inf requests in the second 1 s ago"),
        ([2e9], r"holds 2e\+09 requests"),
        ([[1.0, 2.0]], r"has shape \(1, 2\); give one row"),
        (["many"], "is not a row of numbers"),
    ],
)
def test_invalid_history_is_rejected(name: str, history: list[float], message: str) -> None:
    with pytest.raises(HistoryError, match=message):
        ALL[name].forecast(history, 0.0)


def test_reactive_repeats_the_peak_of_the_last_20_seconds() -> None:
    history = np.concatenate([[99.0], level_load(19), [12.0]])

    assert ReactiveForecaster().forecast(history, 0.0).peak_rps == 12.0
    assert ReactiveForecaster().forecast(history[:-1], 0.0).peak_rps == 99.0


def test_reactive_skips_and_reports_missing_seconds() -> None:
    forecast = ReactiveForecaster().forecast([7.0, 9.0, *[np.nan] * 25], 0.0)

    assert (forecast.peak_rps, forecast.source) == (9.0, "reactive")
    assert forecast.reason == "the newest measured second is 25 s old"


@pytest.mark.parametrize("forecaster", [ALL["reactive"], ALL["lstm"], shipped_forecaster()])
def test_missing_metrics_differ_from_no_load(forecaster: Forecaster) -> None:
    nothing_known = forecaster.forecast([], 1000.0)
    lost = forecaster.forecast([np.nan] * 130, 1001.0)
    silence = forecaster.forecast([0.0] * 130, 1002.0)

    assert (nothing_known.peak_rps, nothing_known.is_measured) == (0.0, False)
    assert nothing_known.reason.endswith("no load measured yet")
    assert (lost.peak_rps, lost.is_measured) == (0.0, False)
    assert lost.reason == "no load measured in the last 130 s"
    assert (silence.peak_rps, silence.is_measured) == (0.0, True)


def test_lost_metrics_repeat_the_last_forecast() -> None:
    forecaster = shipped_forecaster()
    before = forecaster.forecast(level_load(30, 25.0), 0.0)

    after = forecaster.forecast([np.nan] * 150, 60.0)

    assert (before.peak_rps, before.is_measured) == (25.0, True)
    assert (after.peak_rps, after.is_measured, after.source) == (25.0, False, "reactive")
    assert after.reason == "no load measured in the last 150 s"


def test_oracle_reads_the_played_trace() -> None:
    forecast = OracleForecaster(TRACE, offset_seconds=-1000.0).forecast([], 1010.0)

    assert (forecast.peak_rps, forecast.source, forecast.reason) == (30.0, "oracle", "read from ramp")


@pytest.mark.parametrize("now_seconds", [600.0, 5000.0, -50.0])
def test_oracle_outside_its_trace_is_reactive(now_seconds: float) -> None:
    forecast = OracleForecaster(TRACE).forecast(level_load(20), now_seconds)

    assert (forecast.peak_rps, forecast.source) == (10.0, "reactive")
    assert forecast.reason == f"ramp has no load at second {now_seconds:.0f} of its 600"


def test_lstm_is_reactive_until_two_minutes_of_history() -> None:
    forecaster = shipped_forecaster()

    early = forecaster.forecast(level_load(42), 42.0)
    later = forecaster.forecast(level_load(120), 120.0)

    assert (early.source, early.reason) == ("reactive", "42 s of history, LSTM needs 120 s")
    assert (later.source, later.reason) == ("lstm", "two minutes of history; no forecast scored yet")


def test_many_missing_seconds_fall_back() -> None:
    forecaster = LstmForecaster(LstmWeights.load())
    history = level_load(150, 30.0)
    history[40:64] = np.nan
    few = forecaster.forecast(history, 0.0)
    history[70] = np.nan
    many = forecaster.forecast(history, 0.0)

    assert (few.source, many.source) == ("lstm", "reactive")
    assert few.peak_rps == pytest.approx(30.0, rel=0.1)
    assert many.reason == "25 of the last 120 s not measured, LSTM can do without 24"


def run(forecaster: Forecaster, load: NDArray[np.float64]) -> list[Forecast]:
    """Play a load, with a forecast every ten seconds."""
    return [forecaster.forecast(load[:now], float(now)) for now in range(10, load.size + 1, 10)]


def test_worse_lstm_falls_back_and_reports_its_errors() -> None:
    answers = run(FallbackForecaster(Saying(1.5)), level_load(300))

    # 10 against a true 10, and 15 against it: 2·5/25 = 40 %.
    assert answers[-1].source == "reactive"
    assert answers[-1].reason.startswith("LSTM worse than reactive over the last ")
    assert answers[-1].reason.endswith("forecasts: 40.0% against 0.0%")
    judged = [answer for answer in answers if answer.source == "lstm" and answer.reason.startswith("too few")]
    assert len(judged) == MIN_FORECASTS - 1


def test_recovered_lstm_is_used_again() -> None:
    level = level_load(400, 10.0)
    growth = 10.0 * 1.01 ** np.arange(1, 601)
    # The peak of the next 20 s over the mean of the last 120 s, while the load grows by 1 % a second.
    right_ratio = 120 * 1.01**20 / (1.01 ** -np.arange(120)).sum()
    forecaster = FallbackForecaster(Saying(right_ratio))

    answers = run(forecaster, np.concatenate([level, growth]))

    assert (answers[39].source, answers[-1].source) == ("reactive", "lstm")
    assert answers[-1].reason == "no worse than reactive over the last 30 forecasts: 0.0% against 19.8%"


def test_forecast_is_scored_against_its_own_seconds() -> None:
    forecaster = FallbackForecaster(None)
    load = np.concatenate([level_load(20, 10.0), level_load(20, 30.0), level_load(20, 90.0)])

    first = forecaster.forecast(load[:20], 20.0)
    too_early = forecaster.forecast(load[:39], 39.0)
    due = forecaster.forecast(load[:47], 47.0)

    assert first.recent_error is None
    assert too_early.recent_error is None
    # Made at 20 s (10 rps) about 20 to 40 s (30 rps): 2·20/40, although 90 rps were seen since.
    assert due.recent_error == pytest.approx(1.0)
    assert due.reason == "no LSTM given"


def test_missing_seconds_and_a_clock_set_back_are_not_scored() -> None:
    forecaster = FallbackForecaster(None)
    forecaster.forecast(level_load(20), 20.0)
    history = np.concatenate([level_load(20), np.full(6, np.nan), level_load(14, 50.0)])

    assert forecaster.forecast(history, 40.0).recent_error is None
    assert forecaster.forecast(level_load(60, 99.0), 0.0).recent_error is None
    assert forecaster.forecast(level_load(60, 99.0), 20.0).recent_error == 0.0


def test_repeated_forecast_is_scored_once() -> None:
    load = level_load(400)
    once, twice = shipped_forecaster(), shipped_forecaster()

    for now in range(120, 400, 10):
        twice.forecast(load[:now], float(now))
        assert once.forecast(load[:now], float(now)) == twice.forecast(load[:now], float(now))


@pytest.mark.parametrize("content", [None, b"", b"not an archive", b"PK\x03\x04 cut off"])
def test_unusable_weights_fall_back_and_are_reported(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "lstm.npz"
    if content is not None:
        path.write_bytes(content)

    forecast = shipped_forecaster(path).forecast(level_load(200), 0.0)

    assert (forecast.source, forecast.peak_rps) == ("reactive", 10.0)
    assert forecast.reason.startswith(f"forecaster weights {path} cannot be read")
    assert "train them again with: python -m trimtab_predictor.train" in forecast.reason


@given(
    history=st.lists(st.one_of(st.floats(0, 1e9), st.just(float("nan"))), max_size=300),
    now=st.floats(-1e9, 1e9, allow_nan=False),
)
def test_valid_history_has_a_bounded_forecast(history: list[float], now: float) -> None:
    forecaster = shipped_forecaster()

    for later in (0, 10, 20, 30):
        forecast = forecaster.forecast(history, now + later)

        highest = max((rps for rps in history if rps == rps), default=0.0)  # noqa: PLR0124 - NaN is not itself
        assert 0 <= forecast.peak_rps <= 4 * highest
        assert forecast.is_measured == any(rps == rps for rps in history)  # noqa: PLR0124 - NaN is not itself
        assert forecast.reason


def test_quantiles_are_interpolated() -> None:
    forecast = Forecast(10.0, "lstm", "", quantiles=((0.5, 10.0), (0.9, 14.0), (0.99, 20.0)))

    assert forecast.at(0.5) == 10.0
    assert forecast.at(0.7) == pytest.approx(12.0)
    assert forecast.at(0.999) == 20.0
    assert Forecast(10.0, "oracle", "").at(0.99) == 10.0


@pytest.mark.parametrize("name", ALL)
def test_higher_quantiles_are_no_lower(name: str) -> None:
    load = np.random.default_rng(2).poisson(20.0, 300).astype(np.float64)

    forecast = ALL[name].forecast(load, 300.0)

    assert forecast.peak_rps <= forecast.at(0.9) <= forecast.at(0.99)


@pytest.mark.parametrize(
    ("reaches", "expected"),
    [
        ([2.0] * 19, 1.0),  # too few to say
        ([2.0] * 4 + [0.5] * 26, 1.0),  # chance allows as many
        ([2.0] * 10 + [0.5] * 20, 2.0),
        ([99.0] * 30, MAX_WIDENING),
    ],
)
def test_quantiles_are_widened_only_beyond_chance(reaches: list[float], expected: float) -> None:
    assert widening_factor(reaches) == expected


def test_repeatedly_exceeded_quantile_is_widened() -> None:
    load = np.random.default_rng(4).poisson(40.0, 900).astype(np.float64)
    level = float(np.median([load[at : at + 20].max() for at in range(120, 860, 10)]) / load.mean())

    *_, last = run(FallbackForecaster(Saying(level, p90=1.001)), load)

    assert last.source == "lstm"
    assert last.reason.endswith("quantiles widened by a factor of 5.0")
    assert last.at(0.9) == pytest.approx(last.peak_rps * 1.005, rel=1e-6)
