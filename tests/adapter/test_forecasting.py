"""The forecaster a pipeline asks for, with the reason where it gets another."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.adapter.scenes import a_ladder, plan_for
from trimtab_adapter.controller import Controller
from trimtab_adapter.forecasting import (
    CurrentForecaster,
    PlayedTrace,
    TrainedWeights,
    forecast_record,
    forecaster_for,
    not_below_trend,
    trend_rps,
)
from trimtab_adapter.observation import Load
from trimtab_pipelines.plan import ForecastRecord
from trimtab_pipelines.spec import Adaptation
from trimtab_predictor.forecaster import Forecast, ReactiveForecaster
from trimtab_predictor.load_history import ObservationError
from trimtab_predictor.lstm import SHIPPED_WEIGHTS, LstmWeights

MINUTES = Load(1000.0, (10.0,) * 300)
LSTM, ORACLE = Adaptation(), Adaptation(forecaster="Oracle")


def test_the_oracle_reads_the_trace_from_its_start(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("rps\n" + "\n".join(str(n) for n in range(100)) + "\n")
    oracle = forecaster_for(ORACLE, PlayedTrace(trace, start_seconds=960.0))
    record = forecast_record(oracle, MINUTES, ORACLE)

    assert (record.source, record.peak_rps) == ("oracle", 59.0)


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "the oracle has no trace"), ("rps\nmany\n", "the oracle's trace is invalid: ")]
)
def test_an_oracle_without_a_trace_is_reactive_and_says_so(tmp_path, content, reason):
    trace = None
    if content is not None:
        (tmp_path / "trace.csv").write_text(content)
        trace = PlayedTrace(tmp_path / "trace.csv", 0.0)
    record = forecast_record(forecaster_for(ORACLE, trace), MINUTES, ORACLE)

    assert record.source == "reactive"
    assert record.reason.startswith(reason)


@pytest.mark.parametrize(
    ("peak_rps", "reason"),
    [
        (None, "the forecaster failed: RuntimeError: weights are gone"),
        (float("inf"), "lstm forecast inf requests/s, which is invalid"),
        (5.0, "10 requests/s arrived in the newest second; lstm expected no more than 5"),
    ],
)
def test_failed_or_impossible_forecast_is_replaced(peak_rps, reason):
    class Fixed:
        name = "lstm"

        def forecast(self, history_rps, now_seconds):  # noqa: ARG002 - the shared signature
            if peak_rps is None:
                raise RuntimeError("weights are gone")
            return Forecast(peak_rps, "lstm", "sure")

    record = forecast_record(Fixed(), MINUTES, LSTM)

    assert (record.peak_rps, record.source, record.reason) == (10.0, "reactive", reason)


def test_a_rise_is_planned_for_its_busiest_second():
    """A steady load of 60 requests/s has seconds of 74; the newest one alone would be outgrown again."""
    step = Load(1000.0, (*[20.0] * 300, 60.0))
    controller = Controller(ReactiveForecaster())
    planned = plan_for(a_ladder(), 30.0)

    rise = controller.forecast(step, 1000.0, a_ladder().spec, planned)
    steady = controller.forecast(step, 1000.0, a_ladder().spec, plan_for(a_ladder(), 60.0))

    assert rise.peak_rps == pytest.approx(74.5, abs=0.1)
    assert rise.reason == "60 requests/s arrived in the newest seconds, more than planned for"
    assert steady.peak_rps == 60.0


@pytest.mark.parametrize(
    ("newest", "planned_for"), [((4.0, 4.0, 4.0, 11.0), 11.0), ((9.0, 9.0, 9.0, 11.0), 15.3), ((4.0, 16.0), 23.5)]
)
def test_a_second_within_the_noise_is_no_rise(newest, planned_for):
    """A plan for a busiest second of 9 is of 4.9 a second, which bring 11 each minute, but not 38 in four seconds."""
    load = Load(1000.0, (*[4.0] * 300, *newest))
    controller = Controller(ReactiveForecaster())

    assert controller.forecast(load, 1000.0, a_ladder().spec, plan_for(a_ladder(), 9.0)).peak_rps == pytest.approx(
        planned_for, abs=0.1
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_steady_noisy_load_has_no_trend(seed):
    noisy = np.random.default_rng(seed).poisson(60.0, 2000).astype(float)
    trends = [trend_rps(noisy[at - 120 : at].tolist(), 110.0) for at in range(120, 2000, 10)]

    assert np.count_nonzero(trends) <= 2


@pytest.mark.parametrize(
    ("slope", "ahead", "expected"), [(0.2, 110.0, 124.0), (0.2, 1000.0, 204.0), (-0.2, 110.0, 0.0)]
)
def test_a_rise_continues_up_to_twice_the_load(slope, ahead, expected):
    assert trend_rps(100.0 + slope * np.arange(-109.0, 11.0), ahead) == pytest.approx(expected, abs=3.0)


def test_a_step_that_is_over_is_no_trend():
    assert trend_rps((60.0,) * 60 + (90.0,) * 60, 110.0) == 0.0


@pytest.mark.parametrize(
    "history", [(), (60.0,) * 80, (*range(60), *(float("nan"),) * 60)], ids=["none", "short", "gap"]
)
def test_an_unknown_history_has_no_trend(history):
    assert trend_rps(history, 110.0) == 0.0


@pytest.mark.parametrize(("lead", "source"), [(0.0, "lstm"), (20.0, "lstm"), (90.0, "reactive")])
def test_only_nodes_slower_than_the_horizon_are_planned_ahead(lead, source):
    forecast = not_below_trend(ForecastRecord(peak_rps=60.0, source="lstm"), tuple(map(float, range(120))), lead, 20.0)

    assert forecast.source == source
    assert (forecast.peak_rps > 200.0) == (source == "reactive")


def test_a_load_of_which_nothing_was_measured_is_no_forecast():
    with pytest.raises(ObservationError, match=r"^the load is not known: no load measured in the last 3 s$"):
        forecast_record(ReactiveForecaster(), Load(1000.0, (float("nan"),) * 3), LSTM)


def test_a_plan_may_ask_for_more_than_the_middle_of_the_forecast():
    noisy = Load(1000.0, tuple(float(8 + 7 * n % 9) for n in range(300)))
    careful = Adaptation(demand_quantile=0.9)

    middle = forecast_record(forecaster_for(LSTM, None), noisy, LSTM)
    high = forecast_record(forecaster_for(careful, None), noisy, careful)

    assert (middle.quantile, high.quantile) == (None, 0.9)
    assert high.peak_rps > middle.peak_rps


HISTORY = [20.0, 24.0, 18.0, 30.0] * 60
NOW = 1_700_000_000.0


def put(folder: Path, content: bytes, at: int) -> None:
    path = folder / TrainedWeights.FILE
    path.write_bytes(content)
    os.utime(path, (at, at))


def test_weights_come_change_and_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights, adaptation = TrainedWeights(tmp_path), Adaptation()
    forecaster = CurrentForecaster(lambda: adaptation, weights)

    def peak() -> float:
        return forecaster.forecast(HISTORY, NOW).peak_rps

    shipped = peak()
    weights_in_use = LstmWeights.load(SHIPPED_WEIGHTS)
    put(tmp_path, replace(weights_in_use, dense_bias=weights_in_use.dense_bias + 1.0).to_bytes(), 1)
    trained = peak()
    put(tmp_path, b"no weights", 2)
    still = peak()
    (tmp_path / TrainedWeights.FILE).unlink()

    assert trained != shipped
    assert still == trained
    assert "the weights in use stay" in caplog.text
    assert peak() == shipped


def test_what_is_remembered_of_the_load_outlives_the_weights(tmp_path: Path) -> None:
    weights, adaptation = TrainedWeights(tmp_path), Adaptation()
    chance = np.random.default_rng(3)
    hours = chance.poisson(([40.0] * 1740 + [60.0] * 60) * 12)  # what recurs each half hour: ten minutes do not show it
    minutes = chance.poisson([40.0] * 600)

    def peak(*, renewed: bool) -> float:
        forecaster = CurrentForecaster(lambda: adaptation, weights)
        forecaster.forecast(hours, NOW)
        if renewed:
            put(tmp_path, SHIPPED_WEIGHTS.read_bytes(), 1)
        return forecaster.forecast(minutes, NOW + 1735).peak_rps

    assert peak(renewed=True) == peak(renewed=False)


def test_a_folder_that_is_not_there_is_no_fault(tmp_path: Path) -> None:
    shutil.rmtree(tmp_path)
    assert CurrentForecaster(Adaptation, TrainedWeights(tmp_path)).forecast(HISTORY, NOW).source == "lstm"
    assert CurrentForecaster(Adaptation, TrainedWeights(None)).forecast(HISTORY, NOW).source == "lstm"


def test_a_pipeline_may_ask_for_another_forecaster_at_any_time() -> None:
    asked = Adaptation()
    forecaster = CurrentForecaster(lambda: asked, TrainedWeights(None))

    assert forecaster.forecast(HISTORY, NOW).source == "lstm"
    asked = Adaptation(forecaster="Reactive")
    assert forecaster.forecast(HISTORY, NOW).source == "reactive"
