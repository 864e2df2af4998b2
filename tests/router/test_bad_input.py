"""Invalid input over REST and gRPC: codes, messages, and no effect on other requests."""

import gzip
import json

import grpc
import numpy as np
import pytest

from tests.router.fakes import FakeReplica, a_pipeline, a_request, a_rig
from trimtab_protocol import InferRequest, RequestedOutput, Tensor, grpc_messages
from trimtab_router.limits import MEBIBYTE, Limits

PIPELINE = a_pipeline(1)


@pytest.fixture
async def rig():
    async with a_rig(PIPELINE, {"stage-0": [FakeReplica()]}, limits=Limits(max_payload_bytes=MEBIBYTE)) as rig:
        yield rig


def x(array, name="x"):
    return a_request(inputs=(Tensor.of(name, np.asarray(array)),))


ROW = np.zeros((1, 4), np.float32)
BAD_REQUESTS = [
    (a_request(inputs=()), "the request has no inputs; sample needs at least one tensor|input 'x' is missing"),
    (x(ROW, "z"), "unknown input 'z'; sample takes: x"),
    (x(np.zeros((1, 4))), "input 'x' is FP64; it must be FP32"),
    (x(np.zeros((1, 5), np.float32)), r"input 'x' has shape \[1, 5\]; it must be \[rows, 4\]"),
    (x(np.zeros(4, np.float32)), r"input 'x' has shape \[4\]; it must be \[rows, 4\]"),
    (x(np.zeros((0, 4), np.float32)), "input 'x' has no rows; its first dimension must be at least 1"),
    (x(np.full((1, 4), np.nan, np.float32)), "input 'x' holds NaN or an infinity; every number must be finite"),
    (x(np.array([[0, 0, np.inf, 0]], np.float32)), "input 'x' holds NaN or an infinity"),
    (x(np.zeros((2000, 4), np.float32)), "2000 rows in one request; send at most 1024"),
    (a_request(parameters={"timeout": -1}), "parameter 'timeout' is -1; it must be at least 0 microseconds"),
    (
        a_request(parameters={"timeout": "5"}),
        "parameter 'timeout' is '5'; it must be an integer number of microseconds",
    ),
    (a_request(parameters={"timeout": True}), "parameter 'timeout' is True; it must be an integer"),
    (a_request(requested_outputs=(RequestedOutput("z"),)), "unknown output 'z'; sample has: y"),
    (a_request(requested_outputs=(RequestedOutput("y"),) * 3), "the request names an output twice: 'y'"),
    (
        a_request(requested_outputs=(RequestedOutput("y", {"shared_memory_region": "r"}),)),
        "output 'y': shared memory is not supported; leave it out",
    ),
    (
        a_request(requested_outputs=(RequestedOutput("y", {"classification": 3}),)),
        r"output 'y': classification \(class_count\) is not supported; leave it out",
    ),
]


@pytest.mark.parametrize(("request_", "message"), BAD_REQUESTS)
async def test_bad_requests(rig, request_: InferRequest, message):
    status, error, headers = await rig.rest(request_)
    assert status == 400
    assert _matches(message, error)
    assert headers["x-trimtab-reason"] == "InvalidArgument"

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.grpc(request_)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert _matches(message, caught.value.details())

    assert (await rig.rest(a_request()))[0] == 200
    assert await rig.outcomes() == {"refused": 2, "ok": 1}


def _matches(pattern, text):
    import re  # noqa: PLC0415 - only here

    return re.search(pattern, text) is not None


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v2/repository/index", "RepositoryIndex"),
        ("/v2/models/sample/stats", "ModelStatistics"),
        ("/v2/trace/setting", "TraceSetting"),
        ("/v2/logging", "LogSettings"),
        ("/v2/systemsharedmemory/status", "SystemSharedMemoryStatus"),
    ],
)
async def test_unsupported_extensions_are_refused_by_name(rig, path, method):
    status, error = await rig.get(path)
    assert status == 404
    assert path in error["error"]

    call = f"/inference.GRPCInferenceService/{method}"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (await rig.channel()).unary_unary(call, None, None)(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert f"{call} is not supported: unknown path" in (caught.value.details() or "")


@pytest.mark.parametrize(("name", "value"), [("sequence_id", 5), ("sequence_id", "a"), ("sequence_start", True)])
async def test_sequence_parameters_are_refused_unless_empty(rig, name, value):
    status, message, _ = await rig.rest(a_request(parameters={name: value}))
    assert (status, f"parameter '{name}': sequences are not supported" in message) == (400, True)
    assert (await rig.rest(a_request(parameters={name: type(value)()})))[0] == 200


@pytest.mark.parametrize(
    ("model", "version", "message"),
    [
        ("other", "", "unknown model 'other'; this router serves 'sample'"),
        ("sample", "7", "model 'sample' has no version '7'; it has version '1'"),
    ],
)
async def test_unknown_models_and_versions_are_not_found(rig, model, version, message):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.grpc(a_request(model_name=model, model_version=version))
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.NOT_FOUND, message)

    path = f"{model}/versions/{version}" if version else model
    status, error, _ = await rig.post(path, b"{}")
    assert status in {400, 404}
    status, error = await rig.get(f"/v2/models/{path}")
    assert (status, error) == (404, {"error": message})


@pytest.mark.parametrize(
    ("body", "headers", "status", "message"),
    [
        (b"not json", {}, 400, "the JSON header cannot be read"),
        (b"", {}, 400, "the JSON header cannot be read"),
        (b"{}", {}, 400, "'inputs' must be a list of tensors"),
        (b"{}", {"Inference-Header-Content-Length": "nine"}, 400, "Inference-Header-Content-Length is 'nine'"),
        (b"this is no gzip", {"Content-Encoding": "gzip"}, 400, "body"),
        (bytes(2 * MEBIBYTE), {}, 413, "the body has 2097152 bytes; at most 1048576 bytes are accepted"),
    ],
)
async def test_bodies_that_are_no_requests(rig, body, headers, status, message):
    assert (await rig.post("sample", body, **headers))[0] == status
    _, error, _ = await rig.post("sample", body, **headers)
    assert message in error

    assert (await rig.rest(a_request()))[0] == 200
    assert await rig.outcomes() == {"refused": 2, "ok": 1}


async def test_a_body_that_unpacks_beyond_the_limit_is_refused(rig):
    body = gzip.compress(bytes(8 * MEBIBYTE), mtime=0)

    status, error, _ = await rig.post("sample", body, **{"Content-Encoding": "gzip"})
    assert status == 413
    assert "at most 1048576 bytes are accepted" in error


async def test_bodies_in_chunks_or_after_a_100_continue_are_read(rig):
    body = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}).encode()

    async def pieces():
        for at in range(0, len(body), 10):
            yield body[at : at + 10]

    url = f"{rig.url}/v2/models/sample/infer"
    async with (
        rig.session.post(url, data=pieces()) as chunked,
        rig.session.post(url, data=body, expect100=True) as expecting,
    ):
        for answer in (chunked, expecting):
            assert (await answer.json())["outputs"][0]["data"] == [2, 3, 4, 5]
    assert await rig.metric("trimtab_bytes_in_flight") == 0


async def test_grpc_messages_that_are_none(rig):
    call = (await rig.channel()).unary_unary(grpc_messages.method_path("ModelInfer"), None, None)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"\xff\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "ModelInferRequest" in str(caught.value.details())

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(bytes(2 * MEBIBYTE))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == "the body is too large; at most 1048576 bytes are accepted"


async def test_fields_outside_the_protocol_are_ignored(rig):
    data = [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4], "mood": "calm"}]

    status, answer, _ = await rig.post("sample", json.dumps({"inputs": data, "colour": 3}).encode())
    assert status == 200
    assert answer.outputs[0].array.tolist() == [[2, 3, 4, 5]]


async def test_paths_and_methods_that_do_not_exist(rig):
    status, answer = await rig.get("/v3")
    assert (status, answer) == (404, {"error": "unknown path /v3; try /v2/models/sample/infer"})

    status, answer = await rig.get("/v2/models/sample/infer")
    assert (status, answer) == (405, {"error": "GET /v2/models/sample/infer: infer takes POST"})


async def _release(rig, replica, calls):
    """Let a batch block the replica, queue the calls behind it, then let go."""
    import asyncio  # noqa: PLC0415 - only here

    first = asyncio.ensure_future(rig.rest(a_request()))
    await replica.arrived.wait()
    waiting = [asyncio.ensure_future(call) for call in calls]
    await rig.until(lambda: rig.router.state().stages["stage-0"].queue_rows == len(calls))
    replica.gate.set()
    return await asyncio.gather(first, *waiting)
