"""`RouterState`: readable by older and newer versions of the control plane."""

import pytest
from pydantic import ValidationError

from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.router_state import RecentRequests, RouterLoad, RouterState


def test_unknown_fields_are_ignored_and_absent_ones_default():
    state = RouterState.model_validate({"stages": {"read": {"variant": "small", "temperature": 3}}, "mood": "well"})

    assert state.stages["read"].variant == "small"
    assert state.stages["read"].rows_per_request is None
    assert (state.ready, state.served) == (False, None)


def test_router_state_round_trips():
    served = RecentRequests(received=3, ok=1, late=1, dropped=1, p99_seconds=0.5, accuracy=0.9)
    state = RouterState(plan_generation=2, plan_applied_at=1.5, ready=True, served=served, stages={})

    assert RouterState.model_validate_json(state.model_dump_json()) == state
    assert served.answered == 2


@pytest.mark.parametrize("wrong", [{}, {"stages": []}, {"stages": {"read": {"queue_rows": -1}}}, {"stages": {"": 1}}])
def test_invalid_router_state_is_rejected(wrong):
    with pytest.raises(ValidationError):
        RouterState.model_validate(wrong)


def test_every_outcome_has_a_count():
    assert {end.word for end in RequestOutcome} < set(RecentRequests.model_fields)


def test_arrival_counts_are_a_load():
    assert RouterLoad(now=7.0, rps=[1, 2]) == RouterLoad.model_validate_json('{"now": 7, "rps": [1, 2.0]}')
