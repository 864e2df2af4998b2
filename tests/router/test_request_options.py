"""Request options: parsed, refused if invalid, and resolved into terms and deadlines."""

import numpy as np
import pytest

from tests.builders import a_pipeline, a_stage, a_variant
from tests.router.chats import a_chat_pipeline, a_writer
from tests.router.test_generation import Writers
from tests.router.test_stage_scheduler import SchedulerScenario
from trimtab_pipelines.tasks import TaskRecord
from trimtab_protocol import InferRequest
from trimtab_router.execution.executor import PipelineExecutor
from trimtab_router.execution.graph import Graph
from trimtab_router.execution.request_resolver import RequestResolver
from trimtab_router.refusal import Refusal
from trimtab_router.request import NO_OPTIONS, Call, RequestOptions, parse_request_options

TASK = {"name": "t", "storageUri": "random://?seed=1", "latency": "50ms", "utility": 0.5}
ARRIVED_AT = 7.0


def a_resolver(pipeline=None):
    """Resolver of a one-stage pipeline with an SLO of 100 ms, its tasks, and the latency model of the stage."""
    pipeline = pipeline or a_pipeline(
        [a_stage(variants=[a_variant(tasks=[TASK]), a_variant("large")])], slo={"latency": "100ms"}
    )
    graph = Graph(pipeline.spec)
    top = Writers(pipeline) if graph.stages[0].generates else SchedulerScenario()
    scheduler = top.scheduler
    scheduler.stage = scheduler.latency_model.stage = graph.stages[0]
    executor = PipelineExecutor(graph, {graph.stages[0].name: scheduler}, top.clock)
    inputs = {name: np.zeros((1, 4), np.float32) for name in ("x", "messages")}
    outputs = tuple(output.name for output in pipeline.spec.outputs)
    resolver = RequestResolver(executor, graph, pipeline.spec)

    def resolve(options, within_seconds=None):
        call = Call(InferRequest("", ()), inputs, outputs, options, 0, ARRIVED_AT, within_seconds)
        return resolver.resolve(call, lambda _: None)

    return resolve, resolver.tasks, scheduler.latency_model


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
    resolve, _, _ = a_resolver()
    terms = resolve(options, within_seconds)

    assert terms.options.utility == utility
    assert terms.deadline == pytest.approx(ARRIVED_AT + timeout_seconds)
    assert terms.completion_deadline == terms.deadline


def test_options_beyond_the_plan_are_refused():
    resolve, _, _ = a_resolver()

    with pytest.raises(Refusal, match="unknown task 'other'; known tasks: t"):
        resolve(RequestOptions(task="other"))
    with pytest.raises(Refusal, match="more than the current plan can give"):
        resolve(RequestOptions(accuracy_floor=0.99))


def test_registered_task_grants_terms_until_unregistered():
    resolve, tasks, _ = a_resolver()
    record = TaskRecord(classes=("a", "b"), transformer="sha256:" + 64 * "0", utility=3.0, latency_seconds=0.02)
    for variant in ("small", "large"):
        tasks.register("first", variant, "new", record)
    state = resolve(RequestOptions(task="new"))

    assert (state.options.utility, state.deadline) == (3.0, pytest.approx(ARRIVED_AT + 0.02))
    tasks.unregister("first", "large", "new")  # another variant has it still
    assert resolve(RequestOptions(task="new")).options == state.options

    tasks.unregister("first", "small", "new")
    tasks.register("first", "small", "new", record.replace(utility=1.0))
    assert resolve(RequestOptions(task="new")).options.utility == 1.0


def test_streamed_response_may_end_within_the_slo():
    pipeline = a_chat_pipeline([a_writer()], slo={"latency": "10s", "timeToFirstToken": "200ms"})
    resolve, _, _ = a_resolver(pipeline)
    state, patient = resolve(NO_OPTIONS), resolve(RequestOptions(timeout_seconds=30.0))

    assert (state.options, state.deadline) == (NO_OPTIONS, ARRIVED_AT + 0.2)
    assert state.completion_deadline == ARRIVED_AT + 10.0
    assert (patient.deadline, patient.completion_deadline) == (ARRIVED_AT + 30.0, ARRIVED_AT + 30.0)


def test_default_options_are_one_object():
    assert parse_request_options({}) is NO_OPTIONS
    assert parse_request_options({"binary_data_output": True, "priority": 0, "timeout": 0}) is NO_OPTIONS
    assert NO_OPTIONS.only_latency


def test_numbers_may_be_sent_as_text():
    options = parse_request_options(
        {"trimtab.accuracy_floor": "0.9", "trimtab.utility": 3, "trimtab.task": "digits", "priority": "1"}
    )

    assert options == RequestOptions(accuracy_floor=0.9, utility=3.0, task="digits", priority=1)
    assert not options.only_latency


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"trimtab.accuracy_floor": 1.5}, "accuracy_floor"),
        ({"trimtab.accuracy_floor": "much"}, "accuracy_floor"),
        ({"trimtab.accuracy_floor": float("nan")}, "accuracy_floor"),
        ({"trimtab.accuracy_floor": True}, "accuracy_floor"),
        ({"trimtab.accuracy_floor": 0.5, "trimtab.accuracy_probability": 1}, "accuracy_probability"),
        ({"trimtab.accuracy_probability": 0.9}, "accuracy_floor"),
        ({"trimtab.utility": -1}, "utility"),
        ({"trimtab.utility": float("inf")}, "utility"),
        ({"trimtab.task": 3}, "task"),
        ({"trimtab.task": "x" * 200}, "128"),
        ({"priority": 6}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": -1}, "priority"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": "1"}, "timeout"),
        ({"trimtab.acuracy_floor": 0.9}, "trimtab.acuracy_floor"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(parameters, named):
    with pytest.raises(Refusal, match=named) as refused:
        parse_request_options(parameters)

    assert refused.value.code.name == "INVALID_ARGUMENT"
