"""The forecaster a pipeline asks for, with the reason where it gets another."""

import pytest

from trimtab_adapter.forecasting import PlayedTrace, forecast_record, forecaster_for
from trimtab_adapter.observation import Load, ObservationError
from trimtab_pipelines.spec import Adaptation
from trimtab_predictor.forecaster import ReactiveForecaster

MINUTES = Load(1000.0, (10.0,) * 300)
LSTM, ORACLE = Adaptation(), Adaptation(forecaster="Oracle")


def test_the_shipped_network_forecasts_from_two_minutes_on():
    record = forecast_record(forecaster_for(LSTM, None), MINUTES, LSTM)
    early = forecast_record(forecaster_for(LSTM, None), Load(1000.0, (10.0,) * 30), LSTM)

    assert record.source == "lstm"
    assert record.peak_rps == pytest.approx(10.0, rel=0.5)
    assert (early.source, early.peak_rps) == ("reactive", 10.0)


def test_the_oracle_reads_the_trace_from_its_start(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("rps\n" + "\n".join(str(n) for n in range(100)) + "\n")
    oracle = forecaster_for(ORACLE, PlayedTrace(trace, start_seconds=960.0))
    record = forecast_record(oracle, MINUTES, ORACLE)

    assert (record.source, record.peak_rps) == ("oracle", 59.0)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "the oracle has no trace"), ("rps\nmany\n", "the oracle's trace is invalid: ")],
)
def test_an_oracle_without_a_trace_is_reactive_and_says_so(tmp_path, content, reason):
    trace = None
    if content is not None:
        (tmp_path / "trace.csv").write_text(content)
        trace = PlayedTrace(tmp_path / "trace.csv", 0.0)
    record = forecast_record(forecaster_for(ORACLE, trace), MINUTES, ORACLE)

    assert record.source == "reactive"
    assert record.reason.startswith(reason)


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
