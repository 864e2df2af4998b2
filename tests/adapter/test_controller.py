"""Control state between two decisions."""

import pytest

from trimtab_adapter.controller import Controller
from trimtab_adapter.observation import State
from trimtab_pipelines.plan import ForecastRecord
from trimtab_predictor.forecaster import ReactiveForecaster


def a_forecast(peak_rps: float) -> ForecastRecord:
    return ForecastRecord(peak_rps=peak_rps, source="reactive")


def situation_at(state: Controller, now_seconds: float):
    return state.planning_inputs(a_forecast(1.0), None, now_seconds, hold_seconds=60.0)


def test_decisions_are_remembered_for_the_hold_time():
    state = Controller(ReactiveForecaster())
    state.record_decision(100.0, a_forecast(40.0))
    state.record_decision(130.0, a_forecast(20.0))
    state.record_decision(140.0, None)  # a plan that was made for no load

    assert situation_at(state, 150.0).recent_rps == ((100.0, 40.0), (130.0, 20.0))
    assert situation_at(state, 165.0).recent_rps == ((130.0, 20.0),)
    assert situation_at(state, 150.0).recent_rps == ((130.0, 20.0),)


def test_measurements_are_damped_and_stay_where_none_comes():
    state = Controller(ReactiveForecaster())
    state.update(State({"read": 2.0, "locate": 0.0}, {("read", "small"): 9.0}))
    state.update(State())
    state.update(State({"read": 2.1}))

    known = situation_at(state, 0.0)

    assert known.rows_per_request == {"read": 2.0, "locate": 0.0}  # too small a change to plan anew
    assert known.service_ratios == pytest.approx({("read", "small"): 4.0})


def test_ten_times_the_work_is_planned_for_at_once():
    state = Controller(ReactiveForecaster())
    state.update(State({"encode": 0.3}, prompt_tokens={"answer": 100.0}))
    state.update(State({"encode": 3.0}, prompt_tokens={"answer": 1000.0}))
    known = situation_at(state, 0.0)
    assert known.rows_per_request == {"encode": 3.0}
    assert known.prompt_tokens == {"answer": 1000.0}

    state.update(State({"encode": 0.3}, prompt_tokens={"answer": 100.0}))
    assert situation_at(state, 0.0).rows_per_request["encode"] > 1.0
