"""What the operator says the nodes can schedule for bounds the budget; what cannot be read of it is said."""

import pytest

from tests.builders import a_pipeline
from trimtab_adapter.cluster.config_source import limit_to_schedulable
from trimtab_pipelines.status import Schedulable

ROOM = Schedulable(cores="2", since="2026-01-01T00:00:00Z").model_dump(mode="json", by_alias=True)


def told(schedulable):
    pipeline = a_pipeline(1, budget={"cores": "8", "gpus": 1})
    return limit_to_schedulable(pipeline.model_copy(update={"status": {"schedulable": schedulable}}))


def test_what_the_operator_wrote_bounds_the_budget():
    pipeline, remark = told(ROOM)
    assert (pipeline.spec.budget.cores, pipeline.spec.budget.gpus) == (2.0, 0)
    assert remark == "the nodes can schedule 2 cores and 0 GPUs of the budget's 8 cores and 1 GPUs"


def test_what_a_later_release_writes_beside_it_is_passed_over():
    pipeline, remark = told(ROOM | {"memory": "4Gi"})
    assert (pipeline.spec.budget.cores, remark) == (2.0, told(ROOM)[1])


def test_nothing_is_said_where_nothing_was_written():
    assert told(None)[1] == ""


@pytest.mark.parametrize(
    ("wrong", "culprit"),
    [
        (ROOM | {"cores": "two"}, "'two' is not a quantity"),
        (ROOM | {"cores": 2}, "cores"),
        (ROOM | {"gpus": "one"}, "gpus"),
        ({}, "cores"),
        (["2"], "cores"),
    ],
)
def test_what_cannot_be_read_is_named_and_bounds_nothing(wrong, culprit):
    pipeline, remark = told(wrong)
    assert pipeline.spec.budget.cores == 8.0
    assert remark.startswith("status.schedulable cannot be read, so the whole budget is used: ")
    assert culprit in remark
