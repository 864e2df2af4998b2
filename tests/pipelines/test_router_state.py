"""`RouterState`: readable by older and newer versions of the control plane."""

import pytest
from pydantic import ValidationError

from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_pipelines.router_state import RecentRequests, RouterState


def test_unknown_fields_are_ignored_and_absent_ones_default():
    state = RouterState.model_validate({"stages": {"read": {"variant": "small", "temperature": 3}}, "mood": "well"})

    assert state.stages["read"].variant == "small"
    assert state.stages["read"].rows_per_request is None
    assert (state.ready, state.served) == (False, None)


@pytest.mark.parametrize("wrong", [{}, {"stages": []}, {"stages": {"read": {"queue_rows": -1}}}, {"stages": {"": 1}}])
def test_invalid_router_state_is_rejected(wrong):
    with pytest.raises(ValidationError):
        RouterState.model_validate(wrong)


def test_every_outcome_has_a_count():
    assert {end.word for end in RequestOutcome} < set(RecentRequests.model_fields)
