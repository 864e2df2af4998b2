"""Streams and large requests through a real Envoy, and unknown methods."""

import asyncio
import io
from collections.abc import AsyncIterator

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.builders import a_stage
from tests.router.fakes import FakeReplica, a_pipeline, a_rig
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_protocol import InferRequest, RequestedOutput, Tensor, grpc_messages, rest
from trimtab_router.ingress.grpc_services import MAX_STREAMS

PIPELINE = a_pipeline(1)
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
async def test_unknown_method_is_unimplemented_at_once(path, details):
    async with a_rig(PIPELINE, {"stage-0": [FakeReplica()]}) as rig:
        call = (await rig.channel()).stream_stream(path, None, None)(never_ending(), timeout=60)
        began = asyncio.get_running_loop().time()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert details in (refused.value.details() or "")
        assert asyncio.get_running_loop().time() - began < 20
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await (await rig.channel()).unary_unary(path, None, None)(b"")
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_check_and_watch_report_status():
    replica = FakeReplica()
    pipeline = a_pipeline(1)
    async with a_rig(pipeline, {"stage-0": [replica]}) as rig:
        stub = health_pb2_grpc.HealthStub(await rig.channel())
        kinds = health_pb2.HealthCheckResponse
        for service in ("", "inference.GRPCInferenceService", "sample"):
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status == kinds.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.Check(health_pb2.HealthCheckRequest(service="another"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
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
    async with a_rig(PIPELINE, {"stage-0": [FakeReplica()]}, edge=EdgeSettings(max_streams=1024)) as rig:
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
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await one_more.read()
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        watches[0].cancel()
        await health.Check(asked)
        assert (await health.Watch(asked).read()).status == health_pb2.HealthCheckResponse.SERVING
        for stream in (*watches, *questions):
            stream.cancel()


async def test_large_messages_go_both_ways():
    any_width = {"datatype": "FP32", "shape": [-1]}
    stage = a_stage("stage-0", outputs=[{"name": "y", **any_width}])
    wide = a_pipeline([stage], inputs=[{"name": "x", **any_width}])
    x = np.arange(BIG // 4, dtype=np.float32).reshape(1, -1)
    wanted = (RequestedOutput("y", {"binary_data": True}),)
    request = InferRequest("sample", (Tensor.of("x", x),), requested_outputs=wanted)
    async with a_rig(wide, {"stage-0": [FakeReplica()]}) as rig:
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
