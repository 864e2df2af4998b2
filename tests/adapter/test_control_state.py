"""What the slow loop remembers from one decision to the next."""

import pytest

from trimtab_adapter.control_state import ControlState
from trimtab_adapter.observation import State
from trimtab_pipelines.plan import ForecastRecord


def a_forecast(peak_rps: float) -> ForecastRecord:
    return ForecastRecord(peak_rps=peak_rps, source="reactive")


def situation_at(deliberation: ControlState, now_seconds: float):
    return deliberation.situation(a_forecast(1.0), None, now_seconds, hold_seconds=60.0)


def test_decisions_are_remembered_for_the_hold_time():
    deliberation = ControlState()
    deliberation.decided(100.0, a_forecast(40.0))
    deliberation.decided(130.0, a_forecast(20.0))
    deliberation.decided(140.0, None)  # a plan that was made for no load

    assert situation_at(deliberation, 150.0).recent_rps == ((100.0, 40.0), (130.0, 20.0))
    assert situation_at(deliberation, 165.0).recent_rps == ((130.0, 20.0),)
    assert situation_at(deliberation, 150.0).recent_rps == ((130.0, 20.0),)


def test_measurements_are_damped_and_stay_where_none_comes():
    deliberation = ControlState()
    deliberation.learn(State({"read": 2.0, "locate": 0.0}, {("read", "small"): 9.0}))
    deliberation.learn(State())
    deliberation.learn(State({"read": 2.1}))

    known = situation_at(deliberation, 0.0)

    assert known.rows_per_request == {"read": 2.0, "locate": 0.0}  # too small a change to plan anew
    assert known.service_ratios == pytest.approx({("read", "small"): 4.0})


def test_ten_times_the_work_is_planned_for_at_once():
    deliberation = ControlState()
    deliberation.learn(State({"encode": 0.3}, prompt_tokens={"answer": 100.0}))
    deliberation.learn(State({"encode": 3.0}, prompt_tokens={"answer": 1000.0}))
    known = situation_at(deliberation, 0.0)
    assert known.rows_per_request == {"encode": 3.0}
    assert known.prompt_tokens == {"answer": 1000.0}

    deliberation.learn(State({"encode": 0.3}, prompt_tokens={"answer": 100.0}))
    assert situation_at(deliberation, 0.0).rows_per_request["encode"] > 1.0
