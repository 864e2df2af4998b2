"""Plan history: how long a plan that failed is not retried."""

import pytest

from tests.builders import a_body, a_pipeline, a_plan
from trimtab_operator.reconciliation.plan_history import read_plan_history

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("time", "is_given_up"), [("2027-01-15T08:00:00Z", True), ("yesterday", False), (None, False), ("9" * 40, False)]
)
def test_failed_plan_waits_unless_its_time_is_unreadable(time: str | None, *, is_given_up: bool) -> None:
    pipeline = a_pipeline()
    plan = a_body(a_plan(pipeline), namespace="team", generation=1)
    condition = {"type": "Applied", "reason": "ReadyTimeout", "observedGeneration": 1, "lastTransitionTime": time}
    plan["status"] = {"conditions": [condition]}

    history = read_plan_history(pipeline, plan, None, NOW)

    assert history.newest is not None
    assert bool(history.given_up) is is_given_up
