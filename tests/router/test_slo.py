"""Service terms: task terms, deadlines and refusals."""

import numpy as np
import pytest

from tests.builders import a_pipeline, a_stage, a_variant
from tests.router.chats import a_chat_pipeline, a_writer
from tests.router.test_stage_scheduler import SchedulerScenario
from trimtab_pipelines.tasks import TaskTerms
from trimtab_router.execution.executor import PipelineExecutor
from trimtab_router.execution.slo import SloResolver
from trimtab_router.refusal import Refusal
from trimtab_router.request.graph import Graph, GraphCursor
from trimtab_router.request.request_options import NO_OPTIONS, RequestOptions, ServiceTerms

TASK = {"name": "t", "storageUri": "random://?seed=1", "latency": "50ms", "utility": 0.5}
ARRIVED_AT = 7.0


def a_resolver(pipeline=None):
    """Resolver of a one-stage pipeline with an SLO of 100 ms, a cursor, and the latency model of the stage."""
    pipeline = pipeline or a_pipeline([a_stage(variants=[a_variant(tasks=[TASK])])], slo={"latency": "100ms"})
    graph, top = Graph(pipeline.spec), SchedulerScenario()
    scheduler = top.scheduler
    scheduler.stage = scheduler.latency_model.stage = graph.stages[0]
    executor = PipelineExecutor(graph, {graph.stages[0].name: scheduler}, top.clock)
    inputs = {name: np.zeros((1, 4), np.float32) for name in ("x", "messages")}
    cursor = GraphCursor(graph, inputs, tuple(output.name for output in pipeline.spec.outputs))
    return SloResolver(executor, graph, pipeline.spec.slo), cursor, scheduler.latency_model


@pytest.mark.parametrize(
    ("options", "within_seconds", "utility", "timeout_seconds"),
    [
        (NO_OPTIONS, None, 1.0, 0.1),
        (RequestOptions(task="t"), None, 0.5, 0.05),
        (RequestOptions(task="t", utility=4.0, timeout_seconds=0.3), None, 2.0, 0.3),
        (RequestOptions(task="t"), 0.02, 0.5, 0.02),
        (RequestOptions(timeout_seconds=60.0), None, 1.0, 1.0),
        (NO_OPTIONS, 60.0, 1.0, 1.0),
    ],
)
def test_terms_combine_options_and_task_within_bounds(options, within_seconds, utility, timeout_seconds):
    resolver, cursor, _ = a_resolver()
    terms = resolver.resolve(options, cursor, ARRIVED_AT, within_seconds)

    assert terms.options.utility == utility
    assert terms.deadline == pytest.approx(ARRIVED_AT + timeout_seconds)
    assert terms.completion_deadline is None


def test_options_beyond_the_plan_are_refused():
    resolver, cursor, _ = a_resolver()

    with pytest.raises(Refusal, match="unknown task 'other'; known tasks: t"):
        resolver.resolve(RequestOptions(task="other"), cursor, ARRIVED_AT)
    with pytest.raises(Refusal, match="more than the current plan can give"):
        resolver.resolve(RequestOptions(accuracy_floor=0.99), cursor, ARRIVED_AT)


def test_registered_task_grants_terms_until_unregistered():
    resolver, cursor, latency_model = a_resolver()
    latency_model.register_task("small", "new", {})
    resolver.register_task("new", TaskTerms.model_validate({"utility": 3.0, "latency": "20ms"}))
    joined = resolver.resolve(RequestOptions(task="new"), cursor, ARRIVED_AT)

    assert (joined.options.utility, joined.deadline) == (3.0, pytest.approx(ARRIVED_AT + 0.02))
    resolver.unregister_task("new")  # a stage knows it still
    assert resolver.resolve(RequestOptions(task="new"), cursor, ARRIVED_AT) == joined

    latency_model.unregister_task("small", "new")
    resolver.unregister_task("new")
    latency_model.register_task("small", "new", {})  # another of that name
    assert resolver.resolve(RequestOptions(task="new"), cursor, ARRIVED_AT).options.utility == 1.0


def test_streamed_response_may_end_within_the_slo():
    pipeline = a_chat_pipeline([a_writer()], slo={"latency": "10s", "timeToFirstToken": "200ms"})
    resolver, cursor, _ = a_resolver(pipeline)

    assert resolver.resolve(NO_OPTIONS, cursor, ARRIVED_AT) == ServiceTerms(
        NO_OPTIONS, ARRIVED_AT + 0.2, ARRIVED_AT + 10.0
    )
    patient = resolver.resolve(RequestOptions(timeout_seconds=30.0), cursor, ARRIVED_AT)
    assert (patient.deadline, patient.completion_deadline) == (ARRIVED_AT + 30.0, ARRIVED_AT + 30.0)
