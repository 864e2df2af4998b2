"""Observations from routers: accepted values, rejected fields by name, and those kept between two decisions."""

import math
import re

import pytest

from trimtab_adapter.controller import Controller
from trimtab_adapter.observation import MAX_AGE, Measured, State, limit_rate_of_change, read_load, read_state
from trimtab_pipelines.plan import ForecastRecord
from trimtab_predictor.forecaster import ReactiveForecaster
from trimtab_predictor.load_history import ObservationError


def test_seconds_before_the_first_arrival_are_not_history():
    assert read_load({"now": 5.0, "rps": [0, 0, 3, 0, 1]}).history_rps == (3.0, 0.0, 1.0)
    assert read_load({"now": 5.0, "rps": [0, 0, 0]}).history_rps == (0.0, 0.0, 0.0)
    assert read_load({"now": 5.0, "rps": [9] + [1] * 10}).peak_rps == 1.0


def test_the_newest_second_need_not_be_a_whole_one():
    assert read_load({"now": 5.25, "rps": [20], "current": 40}).newest_rps == 55.0
    assert read_load({"now": 5.75, "rps": [20], "current": 9}).newest_rps == 20.0
    assert read_load({"now": 5.75, "rps": [20]}).newest_rps == 20.0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "load: expected {'now': seconds, 'rps': [...]}, got 'None'"),
        ({"now": 1.0}, "load: expected {'now': seconds, 'rps': [...]}, got \"{'now': 1.0}\""),
        ({"now": 1.0, "rps": []}, "load.rps is empty; expected the arrivals of each of the last seconds"),
        ({"now": 1.0, "rps": [1, -2]}, "load.rps[1] is -2; expected 0 to 1e+07"),
        ({"now": 1.0, "rps": [1e12]}, "load.rps[0] is 1e+12; expected 0 to 1e+07"),
        ({"now": 1.0, "rps": [math.nan]}, "load.rps[0] is 'nan'; expected a finite number"),
        ({"now": 1.0, "rps": [True]}, "load.rps[0] is 'True'; expected a finite number"),
        ({"now": 1.0, "rps": [1], "current": -1}, "load.current is -1; expected 0 to 1e+07"),
        ({"now": "soon", "rps": [1]}, "load.now is 'soon'; expected a finite number"),
    ],
)
def test_an_absurd_load_is_refused_by_name(content, message):
    with pytest.raises(ObservationError, match=f"^{re.escape(message)}$"):
        read_load(content)


def registered(**accuracy):
    return {"registered_accuracies": {"s": {"full": {"new": accuracy}}}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "state: expected {'stages': {...}}, got '[]'"),
        ({"stages": {"read": 3}}, "state.stages.read: expected a mapping, got '3'"),
        *(
            ({"stages": {"read": {"variant": "s"} | stage}}, f"state.stages.read.{message}")
            for stage, message in (
                ({"rows_per_request": -1}, "rows_per_request is -1; expected 0 to 10000"),
                ({"prompt_tokens": -1}, "prompt_tokens is -1; expected 0 to 1e+08"),
                ({"service_ratio": "fast"}, "service_ratio is 'fast'; expected a finite number"),
                ({"drifted_accuracies": {"full": 1.2}}, "drifted_accuracies.full is 1.2; expected 0 to 1"),
                ({"drifted_by_task": {"full": {"a": 1.5}}}, "drifted_by_task.full.a is 1.5; expected 0 to 1"),
                (registered(value=1.5), "registered_accuracies.s.full.new.value is 1.5; expected 0 to 1"),
                (registered(value=0.5, low=0.6), "registered_accuracies.s.full.new.low is 0.6; expected 0 to 0.5"),
                (registered(value=0.5, high=0.4), "registered_accuracies.s.full.new.high is 0.4; expected 0.5 to 1"),
            )
        ),
    ],
)
def test_an_absurd_state_is_refused_by_name(content, message):
    with pytest.raises(ObservationError, match=f"^{re.escape(message)}$"):
        read_state(content)


def test_what_was_not_measured_yet_is_left_out():
    stages = {"locate": {"variant": "s", "service_ratio": 1.5, "rows_per_request": None}, "read": {"variant": "m"}}
    state = read_state({"stages": stages})

    assert state.service_ratios == {("locate", "s"): 1.5}
    assert state.rows_per_request == {}


@pytest.mark.parametrize(
    ("measured", "used"),
    [(1.2, 1.0), (1.45, 1.135), (3.0, 3.0), (9.0, 4.0), (0.1, 0.73)],
    ids=["noise", "a little more", "much more", "more than is believed", "less"],
)
def test_much_more_work_is_used_at_once_and_less_only_by_and_by(measured, used):
    assert limit_rate_of_change(Measured(1.0, 1.0), measured, 0.0, 4.0).used == pytest.approx(used)
    assert limit_rate_of_change(None, measured, 0.0, 4.0).used == min(measured, 4.0)


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


def test_ratio_of_a_variant_that_no_longer_runs_is_forgotten():
    state = Controller(ReactiveForecaster())
    state.update(State(service_ratios={("read", "heavy"): 2.0}))
    for _ in range(MAX_AGE):
        state.update(State(service_ratios={("read", "light"): 1.0}))
    assert situation_at(state, 0.0).service_ratios == {("read", "heavy"): 2.0, ("read", "light"): 1.0}

    state.update(State(service_ratios={("read", "light"): 1.0}))
    assert situation_at(state, 0.0).service_ratios == {("read", "light"): 1.0}


def test_ten_times_the_work_is_planned_for_at_once():
    state = Controller(ReactiveForecaster())
    state.update(State({"encode": 0.3}, prompt_tokens={"answer": 100.0}))
    state.update(State({"encode": 3.0}, prompt_tokens={"answer": 1000.0}))
    known = situation_at(state, 0.0)
    assert known.rows_per_request == {"encode": 3.0}
    assert known.prompt_tokens == {"answer": 1000.0}

    state.update(State({"encode": 0.3}, prompt_tokens={"answer": 100.0}))
    assert situation_at(state, 0.0).rows_per_request["encode"] > 1.0
