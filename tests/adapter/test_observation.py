"""Observations from routers: accepted values, and rejected fields by name."""

import math

import pytest

from trimtab_adapter.observation import LEAP, Measured, limit_rate_of_change, read_load, read_state
from trimtab_predictor.load_history import ObservationError


def test_seconds_before_the_first_arrival_are_not_history():
    assert read_load({"now": 5.0, "rps": [0, 0, 3, 0, 1]}).history_rps == (3.0, 0.0, 1.0)
    assert read_load({"now": 5.0, "rps": [0, 0, 0]}).history_rps == (0.0, 0.0, 0.0)
    assert read_load({"now": 5.0, "rps": [9] + [1] * 10}).peak_rps == 1.0


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
        ({"now": "soon", "rps": [1]}, "load.now is 'soon'; expected a finite number"),
    ],
)
def test_an_absurd_load_is_refused_by_name(content, message):
    with pytest.raises(ObservationError) as refused:
        read_load(content)
    assert str(refused.value) == message


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
    with pytest.raises(ObservationError) as refused:
        read_state(content)
    assert str(refused.value) == message


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
    assert limit_rate_of_change(Measured(1.0, 1.0), measured, 0.0, 4.0, LEAP).used == pytest.approx(used)
    assert limit_rate_of_change(None, measured, 0.0, 4.0, LEAP).used == min(measured, 4.0)
