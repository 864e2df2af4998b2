"""How a request begins: what its task grants it, how long it may take, and what is refused, by values."""

import numpy as np
import pytest

from tests.builders import a_pipeline, a_stage, a_variant
from tests.router.chats import a_chat_pipeline, a_writer
from tests.router.test_stage_scheduler import Desktop
from trimtab_pipelines.tasks import TaskClass
from trimtab_router.execution.executor import PipelineExecutor
from trimtab_router.execution.slo import SloResolver
from trimtab_router.refusal import Refusal
from trimtab_router.request.graph import Graph, GraphCursor
from trimtab_router.request.request_options import NO_WISH, RequestOptions, ServiceTerms

TASK = {"name": "t", "storageUri": "random://?seed=1", "latency": "50ms", "utility": 0.5}
ARRIVED_AT = 7.0


def a_reception(pipeline=None):
    """Of one stage whose promise is 100 ms; its desk is the stage's own in name and tasks."""
    pipeline = pipeline or a_pipeline([a_stage(variants=[a_variant(tasks=[TASK])])], slo={"latency": "100ms"})
    graph, desk = Graph(pipeline.spec), Desktop().desk
    desk.stage = desk.outlook.stage = graph.stages[0]
    course = PipelineExecutor(graph, {graph.stages[0].name: desk}, desk._clock)
    inputs = {name: np.zeros((1, 4), np.float32) for name in ("x", "messages")}
    walk = GraphCursor(graph, inputs, tuple(output.name for output in pipeline.spec.outputs))
    return SloResolver(course, graph, pipeline.spec.slo), walk


@pytest.mark.parametrize(
    ("wish", "within_seconds", "utility", "timeout_seconds"),
    [
        (NO_WISH, None, 1.0, 0.1),
        (RequestOptions(task="t"), None, 0.5, 0.05),
        (RequestOptions(task="t", utility=4.0, timeout_seconds=0.3), None, 2.0, 0.3),
        (RequestOptions(task="t"), 0.02, 0.5, 0.02),
        (RequestOptions(timeout_seconds=60.0), None, 1.0, 1.0),
        (NO_WISH, 60.0, 1.0, 1.0),
    ],
)
def test_a_request_gets_what_it_asks_for_and_its_task_grants_within_bounds(
    wish, within_seconds, utility, timeout_seconds
):
    reception, walk = a_reception()
    terms = reception.terms(wish, walk, ARRIVED_AT, within_seconds)

    assert terms.wish.utility == utility
    assert terms.deadline == pytest.approx(ARRIVED_AT + timeout_seconds)
    assert terms.ends_by is None


def test_what_no_plan_can_give_is_refused():
    reception, walk = a_reception()

    with pytest.raises(Refusal, match="unknown task 'other'; the plan in force knows: t"):
        reception.terms(RequestOptions(task="other"), walk, ARRIVED_AT)
    with pytest.raises(Refusal, match="more than the plan in force can give"):
        reception.terms(RequestOptions(accuracy_floor=0.99), walk, ARRIVED_AT)


def test_a_task_that_joins_grants_until_it_leaves():
    reception, walk = a_reception()
    outlook = reception._course.desks["first"].outlook
    outlook.enrol("small", "new", {})
    reception.enrol("new", TaskClass.model_validate({"utility": 3.0, "latency": "20ms"}))
    joined = reception.terms(RequestOptions(task="new"), walk, ARRIVED_AT)

    assert (joined.wish.utility, joined.deadline) == (3.0, pytest.approx(ARRIVED_AT + 0.02))
    reception.dismiss("new")  # a stage knows it still
    assert reception.terms(RequestOptions(task="new"), walk, ARRIVED_AT) == joined

    outlook.dismiss("small", "new")
    reception.dismiss("new")
    outlook.enrol("small", "new", {})  # another of that name
    assert reception.terms(RequestOptions(task="new"), walk, ARRIVED_AT).wish.utility == 1.0


def test_an_answer_that_is_written_has_until_the_promise_at_the_least_to_end():
    pipeline = a_chat_pipeline([a_writer()], slo={"latency": "10s", "timeToFirstToken": "200ms"})
    reception, walk = a_reception(pipeline)

    assert reception.terms(NO_WISH, walk, ARRIVED_AT) == ServiceTerms(NO_WISH, ARRIVED_AT + 0.2, ARRIVED_AT + 10.0)
    patient = reception.terms(RequestOptions(timeout_seconds=30.0), walk, ARRIVED_AT)
    assert (patient.deadline, patient.ends_by) == (ARRIVED_AT + 30.0, ARRIVED_AT + 30.0)
