"""Invalid input over REST and gRPC: codes, messages, and no effect on other requests."""

import gzip
import json

import grpc
import numpy as np
import pytest

from tests.router.fakes import a_call, a_pipeline, a_request, a_rig, grpc_refusal
from trimtab_protocol import InferRequest, RequestedOutput, Tensor
from trimtab_router.limits import MEBIBYTE, Limits
from trimtab_router.refusal import Refusal

PIPELINE = a_pipeline(1)


def x(array, name="x"):
    return a_request(inputs=(Tensor.of(name, np.asarray(array)),))


ROW = np.zeros((1, 4), np.float32)
BAD_REQUESTS = [
    (a_request(inputs=()), "input 'x' is missing; sample needs it"),
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
    *(
        (a_request(parameters={name: value}), f"parameter '{name}': sequences are not supported")
        for name, value in (("sequence_id", 5), ("sequence_id", "a"), ("sequence_start", True))
    ),
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
def test_bad_request_is_refused_by_name(request_: InferRequest, message: str):
    with pytest.raises(Refusal, match=message) as refused:
        a_call(PIPELINE, request_, 0.0)
    assert refused.value.reason == "InvalidArgument"


async def test_bad_request_is_refused_over_both_protocols(rig):
    status, error, headers = await rig.rest(x(ROW, "z"))
    assert (status, headers["x-trimtab-reason"]) == (400, "InvalidArgument")

    assert error == "unknown input 'z'; sample takes: x"
    assert await grpc_refusal(rig.grpc(x(ROW, "z"))) == (grpc.StatusCode.INVALID_ARGUMENT, error)
    assert (await rig.rest(a_request()))[0] == 200
    assert await rig.outcomes() == {"refused": 2, "ok": 1}


@pytest.mark.parametrize(
    ("model", "version", "message"),
    [
        ("other", "", "unknown model 'other'; this router serves 'sample'"),
        ("sample", "7", "model 'sample' has no version '7'; it has version '1'"),
    ],
)
async def test_unknown_models_and_versions_are_not_found(rig, model, version, message):
    request = a_request(model_name=model, model_version=version)
    assert await grpc_refusal(rig.grpc(request)) == (grpc.StatusCode.NOT_FOUND, message)
    path = f"{model}/versions/{version}" if version else model
    status, error, _ = await rig.post(path, b"{}")
    assert status in {400, 404}
    status, error = await rig.get(f"/v2/models/{path}")
    assert (status, error) == (404, {"error": message})


async def test_body_that_is_no_request_or_too_large_is_refused():
    bomb = gzip.compress(bytes(8 * MEBIBYTE), mtime=0)
    async with a_rig(limits=Limits(max_payload_bytes=MEBIBYTE)) as rig:
        for body, headers, status, message in (
            (b"not json", {}, 400, "the JSON header cannot be read"),
            (bytes(2 * MEBIBYTE), {}, 413, "the body has 2097152 bytes; at most 1048576 bytes are accepted"),
            (bomb, {"Content-Encoding": "gzip"}, 413, "at most 1048576 bytes are accepted"),
        ):
            found, error, _ = await rig.post("sample", body, **headers)
            assert (found, message in error) == (status, True)
        assert await rig.outcomes() == {"refused": 3}


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
    assert rig.value("trimtab_bytes_in_flight") == 0
