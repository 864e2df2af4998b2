"""Streams and large requests through a real Envoy, their limits, and unknown methods."""

import asyncio
import io
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.builders import a_stage
from tests.router.envoy.http_clients import Reply, post
from tests.router.fakes import FakeReplica, Rig, a_pipeline, a_rig, grpc_refusal
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_protocol import InferRequest, RequestedOutput, Tensor, grpc_messages, rest
from trimtab_router.envoy.bootstrap import MIN_LARGE_IN_FLIGHT, large_request_limits
from trimtab_router.envoy.route_discovery import MAX_BUFFERED_BYTES
from trimtab_router.ingress.grpc_services import MAX_STREAMS
from trimtab_router.limits import MEBIBYTE

ANY_WIDTH = {"datatype": "FP32", "shape": [-1]}
STAGE = a_stage("stage-0", outputs=[{"name": "y", **ANY_WIDTH}])
WIDE = a_pipeline([STAGE], inputs=[{"name": "x", **ANY_WIDTH}])
WANTED = (RequestedOutput("y", {"binary_data": True}),)
X = np.zeros((1, 300 * 1024 // 4), np.float32)
BIG = 16 * 2**20


async def never_ending() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


@pytest.mark.parametrize(
    ("path", "details"),
    [
        ("/inference.GRPCInferenceService/ModelStreamInfer", "inference.GRPCInferenceService"),
        ("/inference.GRPCInferenceService/RepositoryIndex", "inference.GRPCInferenceService"),
        ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "Method not found"),  # grpcurl asks for v1 first
        ("/no.such.Service/Method", "inference.GRPCInferenceService"),
        ("/x", "inference.GRPCInferenceService"),
    ],
)
async def test_unknown_method_is_unimplemented_at_once(rig, path, details):
    call = (await rig.channel()).stream_stream(path, None, None)(never_ending(), timeout=60)
    began = asyncio.get_running_loop().time()
    refused, why = await grpc_refusal(call.read())
    assert (refused, details in why) == (grpc.StatusCode.UNIMPLEMENTED, True)
    assert asyncio.get_running_loop().time() - began < 20
    refused, _ = await grpc_refusal((await rig.channel()).unary_unary(path, None, None)(b""))
    assert refused is grpc.StatusCode.UNIMPLEMENTED


async def test_health_check_and_watch_report_status(rig):
    stub = health_pb2_grpc.HealthStub(await rig.channel())
    kinds = health_pb2.HealthCheckResponse
    for service in ("", "inference.GRPCInferenceService", "sample"):
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status == kinds.SERVING
    unknown, _ = await grpc_refusal(stub.Check(health_pb2.HealthCheckRequest(service="another")))
    assert unknown is grpc.StatusCode.NOT_FOUND
    asked = health_pb2.HealthCheckRequest(service="sample")
    stops, stays = stub.Watch(asked), stub.Watch(asked)
    for watch in (stops, stays):
        assert (await watch.read()).status == kinds.SERVING
    stops.cancel()
    await stub.Check(asked)  # what is said after it is heard after it
    rig.router.terminating = True
    async with asyncio.timeout(20):
        assert (await stays.read()).status == kinds.NOT_SERVING
    stays.cancel()


async def test_many_streams_do_not_block_unary_checks():
    asked = health_pb2.HealthCheckRequest(service="sample")
    async with a_rig(edge=EdgeSettings(max_streams=1024)) as rig:
        health = health_pb2_grpc.HealthStub(await rig.channel())
        reflection = reflection_pb2_grpc.ServerReflectionStub(await rig.channel())
        watches = [health.Watch(asked) for _ in range(MAX_STREAMS)]
        questions = [reflection.ServerReflectionInfo() for _ in range(MAX_STREAMS)]
        for question in questions:
            await question.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        for stream in (*watches, *questions):
            assert await stream.read() is not grpc.aio.EOF  # type: ignore[attr-defined]

        assert (await health.Check(asked)).status == health_pb2.HealthCheckResponse.SERVING
        for one_more in (health.Watch(asked), reflection.ServerReflectionInfo(never_ending())):
            assert (await grpc_refusal(one_more.read()))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        watches[0].cancel()
        await health.Check(asked)
        assert (await health.Watch(asked).read()).status == health_pb2.HealthCheckResponse.SERVING
        for stream in (*watches, *questions):
            stream.cancel()


async def test_large_messages_go_both_ways():
    x = np.arange(BIG // 4, dtype=np.float32).reshape(1, -1)
    request = InferRequest("sample", (Tensor.of("x", x),), requested_outputs=WANTED)
    async with a_rig(WIDE, {"stage-0": [FakeReplica()]}) as rig:
        ports = await rig.proxy()
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc_port}", options=options) as channel:
            sent = grpc_messages.request_to_message(request).SerializeToString()
            received = await channel.unary_unary(grpc_messages.method_path("ModelInfer"), None, None)(sent)
        message = grpc_messages.response_class("ModelInfer").FromString(received)
        assert np.array_equal(grpc_messages.response_from_message(message).outputs[0].array, x + 1)
        buffers, length = rest.encode_request(request)
        url = f"http://127.0.0.1:{ports.rest_port}/v2/models/sample/infer"
        body, headers = b"".join(bytes(buffer) for buffer in buffers), {rest.HEADER_LENGTH: str(length)}
        async with rig.session.post(url, data=io.BytesIO(body), headers={**headers, "x-request-id": "large"}) as answer:
            assert answer.status == 200, await answer.text()
            content = await answer.read()
            assert answer.headers["x-request-id"] == "large"
        answered = rest.decode_response(content, answer.headers.get(rest.HEADER_LENGTH))
        assert np.array_equal(answered.outputs[0].array, x + 1)


async def ask(rig: Rig) -> Reply:
    buffers, length = rest.encode_request(InferRequest("sample", (Tensor.of("x", X),), requested_outputs=WANTED))
    body = b"".join(bytes(buffer) for buffer in buffers)
    assert len(body) > MAX_BUFFERED_BYTES
    return await post(rig, (rest.HEADER_LENGTH, str(length)), body=io.BytesIO(body))


async def set_large_request_limit(rig: Rig, most_under_way: int) -> None:
    await rig.proxy()
    assert rig.listeners.envoy is not None
    assert rig.listeners.overload_task is not None
    rig.listeners.overload_task.cancel()
    await rig.listeners.envoy.set_limits(most_under_way)


async def test_large_requests_reach_the_concurrency_limit():
    replica = FakeReplica()
    async with a_rig(WIDE, {"stage-0": [replica]}) as rig:
        await set_large_request_limit(rig, 64)
        replica.gate.clear()
        asking = [asyncio.create_task(ask(rig)) for _ in range(48)]
        await rig.until(lambda: rig.router.admission.memory.active_requests == 48)
        replica.gate.set()

        assert [(await one).status for one in asking] == [200] * 48


async def test_excess_large_requests_are_refused_at_once():
    """A request that waited in Envoy would be counted nowhere, and miss its deadline."""
    replica = FakeReplica()
    async with a_rig(WIDE, {"stage-0": [replica]}) as rig:
        await set_large_request_limit(rig, 1)
        replica.gate.clear()
        asking = [asyncio.create_task(ask(rig)) for _ in range(MIN_LARGE_IN_FLIGHT)]
        await rig.until(lambda: rig.router.admission.memory.active_requests == MIN_LARGE_IN_FLIGHT)
        async with asyncio.timeout(20):
            refused = [await ask(rig) for _ in range(3)]
        replica.gate.set()

        assert {(one.status, one.headers["x-trimtab-reason"]) for one in refused} == {(429, "Overload")}
        assert Counter([(await one).status for one in asking]) == {200: MIN_LARGE_IN_FLIGHT}


@pytest.mark.parametrize(
    ("window", "heap_mebibytes", "most"), [(1, 180, 32), (64, 180, 64), (4096, 180, 180), (4096, 900, 900), (64, 8, 32)]
)
def test_large_request_limit_fits_half_of_envoys_memory(window, heap_mebibytes, most):
    bounds = large_request_limits(window, heap_mebibytes * MEBIBYTE)

    assert bounds["max_requests"] == most
    assert bounds["max_connections"] > most, "with one for each, who is too many would wait for another's end"
