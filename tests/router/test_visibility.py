"""Metadata, health, metrics, arrivals, state and traces of the router; client and server errors are counted apart."""

import asyncio
import math
import time
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import pytest
from aiohttp.test_utils import make_mocked_request
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import generate_latest

from tests.builders import a_stage, a_variant
from tests.router.fakes import FakeReplica, a_call, a_pipeline, a_request, a_rig, grpc_refusal
from tests.router.test_bad_jobs import PLAN, Sensing, a_sensing_pipeline
from tests.router.test_graph import PAGE, digits, locate, read
from trimtab_pipelines.request_outcome import ErrorCode
from trimtab_protocol import InferRequest, RequestedOutput, Tensor, grpc_messages
from trimtab_router.ingress import model_metadata
from trimtab_router.ingress.admin import AdminIngress
from trimtab_router.refusal import Refusal

TRACE_PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def call(rig, method, **fields):
    request = grpc_messages.request_class(method)(**fields).SerializeToString()
    answer = await (await rig.channel()).unary_unary(grpc_messages.method_path(method), None, None)(request)
    return grpc_messages.response_class(method).FromString(answer)


async def test_metadata_and_health_over_both_front_doors(rig, replica):
    tensor = {"datatype": "FP32", "shape": [-1, 4]}
    described = {"inputs": [{"name": "x", **tensor}], "outputs": [{"name": "y", **tensor}]}
    named = {"name": "sample", "versions": ["1"], "platform": "trimtab_pipeline"}
    assert await rig.get("/v2/models/sample") == (200, named | described)
    assert (await rig.get("/v2"))[1]["extensions"] == ["binary_tensor_data"]
    for path in ("health/live", "health/ready", "models/sample/ready", "models/sample/versions/1/ready"):
        status, answer = await rig.get(f"/v2/{path}")
        assert (status, answer["ready"], answer["live"]) == (200, True, True)
    model = await call(rig, "ModelMetadata", name="sample")
    assert (model.platform, list(model.inputs[0].shape)) == ("trimtab_pipeline", [-1, 4])
    assert (await call(rig, "ServerMetadata")).name == "trimtab"
    assert (await call(rig, "ModelReady", name="sample")).ready
    assert (await call(rig, "ServerLive")).live

    await replica.kill()
    await rig.until(lambda: not rig.router.ready)
    assert (await rig.get("/v2/health/live"))[0] == 200
    assert await rig.get("/v2/health/ready") == (503, {"live": True, "ready": False})
    assert not (await call(rig, "ServerReady")).ready
    assert (await grpc_refusal(call(rig, "ModelReady", name="other")))[0] is grpc.StatusCode.NOT_FOUND


async def test_metadata_lists_optional_inputs_and_points():
    async with a_rig(a_sensing_pipeline(), {"stage-0": [Sensing()]}, **PLAN) as rig:
        _, reply = await rig.get("/v2/models/sample")
        model = await call(rig, "ModelMetadata", name="sample")

    assert [one["parameters"] for one in reply["inputs"]] == [{"trimtab.optional": True}] * 2
    assert all(one.parameters["trimtab.optional"].bool_param for one in model.inputs)
    reads = {"all": ("image,sound", 0.9), "image": ("image", 0.8), "sound": ("sound", 0.6)}
    points: dict[str, Any] = {}
    points |= {f"trimtab.stage-0.small.{name}.modalities": modalities for name, (modalities, _) in reads.items()}
    points |= {f"trimtab.stage-0.small.{name}.accuracy": accuracy for name, (_, accuracy) in reads.items()}
    assert reply["parameters"] == points
    sent = {name: value.string_param for name, value in model.parameters.items()}
    assert sent == {name: str(value) for name, value in points.items()}


def test_metadata_omits_long_texts_over_grpc():
    names = [f"sense-number-{n}-of-a-rather-long-name" for n in range(4)]
    given = [{"name": f"i{n}", "from": f"request.inputs.{name}"} for n, name in enumerate(names)]
    agreeing = {"accuracyEvidence": {"source": "Agreement"}}
    points = [{"name": "some", "accuracy": 0.7, "modalities": ["i2"]}, {"name": "all", "accuracy": 0.9} | agreeing]
    stage = a_stage(inputs=given, variants=[a_variant(operatingPoints=points)])
    declared = [{"name": name, "datatype": "FP32"} for name in names]
    reply = model_metadata(a_pipeline([stage], inputs=declared))
    assert reply["parameters"]["trimtab.first.small.some.modalities"] == names[2]
    assert reply["parameters"]["trimtab.first.small.all.accuracy_source"] == "agreement with a heavier model"
    assert "trimtab.first.small.some.accuracy_source" not in reply["parameters"]
    assert reply["parameters"]["trimtab.first.small.all.modalities"] == ",".join(names)
    assert not any("parameters" in one for one in reply["inputs"])

    message = grpc_messages.metadata_to_message(reply)
    assert "trimtab.first.small.some.modalities" in message.parameters
    assert "trimtab.first.small.all.modalities" not in message.parameters, "its length takes two bytes"
    for name, value in message.parameters.items():
        if value.HasField("string_param"):
            assert value.SerializeToString().decode().endswith(value.string_param), name


async def test_readyz_reports_traffic_acceptance():
    first, second = FakeReplica(), FakeReplica()
    second.unready.add("small")
    async with a_rig(a_pipeline(2), {"stage-0": [first], "stage-1": [second]}, ready=False) as rig:

        async def welcome() -> int:
            return (await rig.get("/readyz"))[0]

        await rig.until(lambda: rig.router.state().stages["stage-0"].ready_replicas == 1)
        assert await welcome() == 503
        second.unready.clear()
        await rig.until(lambda: rig.router.ready)
        assert await welcome() == 200

        await second.kill()  # requests are now queued for a while or refused with a retry time
        await rig.until(lambda: not rig.router.ready)
        assert await welcome() == 200
        rig.router.terminating = True
        assert await welcome() == 503


async def test_scrapes_do_not_block_requests(rig):
    await rig.rest(a_request())
    registry, turns = rig.router.metrics.registry, 0

    async def others():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    going_on = asyncio.create_task(others())
    written = await AdminIngress(rig.router, lambda: asyncio.sleep(0)).answer(make_mocked_request("GET", "/metrics"))
    going_on.cancel()

    assert turns >= len(list(registry.collect())) > 20
    assert written.body == generate_latest(registry)


async def test_metrics_have_prometheus_names_and_labels():
    async with a_rig(a_pipeline(2), {"stage-0": [FakeReplica()], "stage-1": [FakeReplica()]}) as rig:
        for _ in range(3):
            await rig.rest(a_request(rows=2))
        await rig.rest(a_request(model_name="other"))
        status, text = await rig.get("/metrics")

        assert status == 200
        base = 'namespace="default",pipeline="sample"'
        for line in (
            f"trimtab_requests_received_total{{{base}}} 4.0",
            'trimtab_requests_total{namespace="default",outcome="ok",pipeline="sample"} 3.0',
            f"trimtab_expected_accuracy_count{{{base}}} 3.0",
            f"trimtab_plan_generation{{{base}}} 1.0",
            f'trimtab_stage_rows_total{{{base},stage="stage-1"}} 6.0',
            f'trimtab_queue_rows{{{base},stage="stage-0"}} 0.0',
            f'trimtab_batch_size_rows_count{{{base},stage="stage-0",variant="small"}} 3.0',
        ):
            assert line in text
        assert 'trimtab_request_latency_seconds_bucket{le="0.5",' in text
        for name in ("trimtab_stage_queue_seconds", "trimtab_stage_service_seconds", "trimtab_service_ratio"):
            assert f"# TYPE {name} " in text
        assert math.isclose(rig.value("trimtab_expected_accuracy_sum"), 3 * 0.81)


async def test_load_and_state_as_the_adapter_reads_them():
    page = Tensor.of("page", np.zeros((2, 2), np.float32))
    locator = FakeReplica(
        model=lambda inputs: {
            "found": np.full(len(inputs["page"]), 3, np.int64),
            "crops": np.zeros((3 * len(inputs["page"]), 3), np.float32),
        }
    )
    reader = FakeReplica(model=lambda inputs: {"label": np.arange(len(inputs["crop"]))})
    outputs = [output.model_dump(by_alias=True) for output in digits().outputs]
    pipeline = a_pipeline([locate(), read()], inputs=[PAGE], outputs=outputs)
    async with a_rig(pipeline, {"locate": [locator], "read": [reader]}, batchSize=4) as rig:
        _, answer, _ = await rig.rest(InferRequest("sample", (page,)))
        assert {tensor.name: tensor.shape for tensor in answer.outputs} == {"found": (2,), "labels": (6,)}
        assert [batch.rows for batch in reader.seen] == [4, 2]

        asked = InferRequest("sample", (page,), requested_outputs=(RequestedOutput("found", {"binary_data": True}),))
        assert [tensor.name for tensor in (await rig.rest(asked))[1].outputs] == ["found"]

        state = (await rig.get("/trimtab/v1/state"))[1]
        assert state["plan_generation"] == 1
        assert state["accuracy_sources"] == "declared"
        planned = {"variant": "small", "batch_size": 4, "operating_point": "default", "service_ratio": 1.0}
        names = ("drifted_accuracies", "drifted_by_task", "drifted_outputs", "registered_accuracies")
        accuracies: dict[str, Any] = {name: {} for name in names}
        accuracies |= {"other_variants": {}}
        own = {"variant": "small", "operating_point": "default", "escalated": False}
        accuracies |= {"expected_shares": [own | {"rows": 1.0}], "recent_rows": [own | {"rows": 6.0}]}
        accuracies |= {"low_confidence": []}
        now = {"ready_replicas": 1, "queue_rows": 0, "rows_per_request": 3.0, "prompt_tokens": None}
        replicas = {"endpoints": {"replica-0": {"ready": True, "inflight_batches": 0, "rejection": ""}}}
        assert state["stages"]["read"] | {"service_ratio": 1.0} == planned | accuracies | now | replicas
        load = (await rig.get("/trimtab/v1/arrivals"))[1]
        assert len(load["rps"]) < 60  # only since the router counts
        assert len((await rig.get("/trimtab/v1/arrivals?seconds=1"))[1]["rps"]) <= 1
        for wrong in ("0", "-1", "x", "9" * 10):
            status, answer = await rig.get(f"/trimtab/v1/arrivals?seconds={wrong}")
            assert (status, answer["error"]) == (400, f"seconds={wrong}: expected a whole number of at least 1")
        assert abs(load["now"] - time.time()) < 60


async def test_request_ids_and_traces_pass_through(rig, replica):
    _, _, headers = await rig.rest(a_request(), **{"x-request-id": "r-1", "traceparent": TRACE_PARENT})
    assert headers["x-request-id"] == "r-1"
    await rig.grpc(a_request(), metadata=(("x-request-id", "r-2"), ("traceparent", TRACE_PARENT)))

    assert [batch.headers["x-request-id"] for batch in replica.seen] == ["r-1", "r-2"]
    assert [batch.headers["traceparent"] for batch in replica.seen] == [TRACE_PARENT] * 2


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("test")


async def test_request_and_stage_spans_are_exported(exporter, tracer):
    replicas = {"stage-0": [FakeReplica()], "stage-1": [FakeReplica()]}
    async with a_rig(a_pipeline(2), replicas, tracer=tracer) as rig:
        await rig.rest(a_request(), traceparent=TRACE_PARENT)

    spans: dict[str, Any] = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"infer", "stage stage-0", "stage stage-1"}
    assert f"{spans['infer'].parent.span_id:016x}" == "b7ad6b7169203331"
    assert spans["infer"].attributes["trimtab.outcome"] == "ok"
    assert spans["stage stage-1"].attributes["trimtab.variant"] == "small"
    assert spans["stage stage-1"].parent.span_id == spans["infer"].context.span_id
    assert spans["infer"].start_time <= spans["stage stage-0"].start_time <= spans["stage stage-1"].start_time


async def test_span_of_a_dropped_request_has_stage_and_reason(exporter, tracer):
    held = FakeReplica()
    replicas = {"stage-0": [FakeReplica()], "stage-1": [held]}
    async with a_rig(a_pipeline(2), replicas, tracer=tracer) as rig:
        patient = await rig.hold(held)
        status, why, headers = await rig.rest(a_request(parameters={"timeout": 200_000}), traceparent=TRACE_PARENT)
        held.gate.set()
        assert (await patient)[0] == 200
        assert await rig.outcomes() == {"ok": 1, "dropped": 1}
        assert rig.value("trimtab_drops_total", stage="stage-1", reason=headers["x-trimtab-reason"]) == 1
    dropped = next(span for span in exporter.get_finished_spans() if span.name == "infer")
    assert (status, headers["x-trimtab-stage"]) == (504, "stage-1")
    assert why.startswith("dropped at stage stage-1: ")
    attributes = dict(dropped.attributes or {})
    assert (attributes["trimtab.outcome"], attributes["trimtab.stage"]) == ("dropped", "stage-1")
    assert attributes["trimtab.reason"] == headers["x-trimtab-reason"]
    assert headers["x-trimtab-reason"] in {"DeadlineExpired", "DeadlineUnreachable"}
    assert dropped.status.status_code is StatusCode.ERROR
    assert "stage-1" in str(dropped.status.description)


@pytest.mark.parametrize(
    ("status", "reason", "code", "callers"),
    [
        (400, "Malformed", "INVALID_ARGUMENT", True),
        (429, "ClientRateLimited", "RESOURCE_EXHAUSTED", True),
        (429, "Overload", "RESOURCE_EXHAUSTED", False),
        (502, "RouterUnavailable", "UNAVAILABLE", False),
        (503, "RouterUnavailable", "UNAVAILABLE", False),
    ],
)
async def test_proxy_rejections_are_client_or_server_errors(rig, status, reason, code, callers):
    rig.router.accounting.count_proxy_rejections({(status, reason): 3})

    assert rig.value("trimtab_refusals_total", code=code, reason=reason) == 3
    assert rig.value("trimtab_client_errors_total") == (3 if callers else 0)
    assert await rig.outcomes() == {"refused": 3}


async def test_disconnect_after_the_slo_is_a_server_error():
    replica = FakeReplica()
    replica.gate.clear()
    async with a_rig(a_pipeline(1, slo={"latency": "60s"}), {"stage-0": [replica]}) as rig:
        request = a_request(parameters={"timeout": 600_000_000})
        waiting = asyncio.create_task(rig.router.infer(a_call(rig.router.pipeline, request, time.monotonic() - 61.0)))
        await replica.arrived.wait()
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting

        assert await rig.outcomes() == {"dropped": 1}
        assert rig.value("trimtab_client_errors_total") == 0


@pytest.mark.parametrize(
    ("parameters", "callers"), [({}, 0), ({"timeout": 200_000}, 0), ({"timeout": 199_999}, 20)], ids=str
)
async def test_drop_at_the_slo_is_a_server_error(parameters, callers):
    now, pipeline = time.monotonic(), a_pipeline(1, slo={"latency": "200ms"})
    async with a_rig(pipeline, {"stage-0": [FakeReplica()]}) as rig:
        for n in range(20):
            with pytest.raises(Refusal) as caught:
                await rig.router.infer(a_call(pipeline, a_request(parameters=parameters), (now - 1.0) / 2**n))
            assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED

        assert rig.value("trimtab_client_errors_total") == callers
        assert await rig.outcomes() == {"dropped": 20}
