"""Budget limits from `status.schedulable`, and the message for an invalid status."""

import pytest

from tests.builders import a_pipeline
from trimtab_adapter.cluster.config_source import limit_to_schedulable
from trimtab_pipelines.status import Schedulable

ROOM = Schedulable(cores="2", since="2026-01-01T00:00:00Z").model_dump(mode="json", by_alias=True)


def limited_pipeline(schedulable):
    pipeline = a_pipeline(1, budget={"cores": "8", "gpus": 1})
    return limit_to_schedulable(pipeline.model_copy(update={"status": {"schedulable": schedulable}}))


def test_schedulable_capacity_limits_the_budget():
    pipeline, remark = limited_pipeline(ROOM)
    assert (pipeline.spec.budget.cores, pipeline.spec.budget.gpus) == (2.0, 0)
    assert remark == "the nodes can schedule 2 cores and 0 GPUs of the budget's 8 cores and 1 GPUs"


def test_unknown_status_field_is_ignored():
    pipeline, remark = limited_pipeline(ROOM | {"memory": "4Gi"})
    assert (pipeline.spec.budget.cores, remark) == (2.0, limited_pipeline(ROOM)[1])


def test_missing_status_gives_no_remark():
    assert limited_pipeline(None)[1] == ""


@pytest.mark.parametrize(
    ("wrong", "detail"),
    [
        (ROOM | {"cores": "two"}, "'two' is not a quantity"),
        (ROOM | {"cores": 2}, "cores"),
        (ROOM | {"gpus": "one"}, "gpus"),
        ({}, "cores"),
        (["2"], "cores"),
    ],
)
def test_invalid_status_is_named_and_limits_nothing(wrong, detail):
    pipeline, remark = limited_pipeline(wrong)
    assert pipeline.spec.budget.cores == 8.0
    assert remark.startswith("status.schedulable cannot be read, so the whole budget is used: ")
    assert detail in remark
