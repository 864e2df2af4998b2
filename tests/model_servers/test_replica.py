"""One real replica, over the data port and MLServer's own ports."""

import asyncio
import dataclasses
import io
import socket
import time

import aiohttp
import grpc
import numpy as np
import pytest

from tests.model_servers.clients import (
    a_request,
    call,
    call_mlserver_grpc,
    call_mlserver_grpc_raw,
    call_mlserver_rest,
    packed,
    post,
    x,
)
from tests.model_servers.conftest import Gate, serve_gated, write_echoes
from trimtab_protocol import Tensor
from trimtab_protocol.rest import HEADER_LENGTH
from trimtab_protocol.tensors import decode_raw

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
ONE = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}


@pytest.fixture
def ports(replica):
    return replica.ports


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as opened:
        yield opened


async def test_every_port_gives_the_same_numbers(ports, session):
    data_port = await call(session, ports, a_request("quick", x(ROWS)))
    entry = {"name": "x", "datatype": "FP32", "shape": [3, 4], "data": ROWS.tolist()}
    status, rest = await call_mlserver_rest(session, ports, "quick", {"inputs": [entry]})
    over_grpc = await call_mlserver_grpc(ports, a_request("quick", x(ROWS)))
    bytes_answer = await call_mlserver_grpc_raw(ports, packed("quick", ROWS, raw_output=True))

    assert np.array_equal(data_port.y, ROWS + 1)
    assert status == 200
    assert rest["outputs"] == [{"name": "y", "shape": [3, 4], "datatype": "FP32", "data": (ROWS + 1).ravel().tolist()}]
    assert np.array_equal(over_grpc.outputs[0].array, ROWS + 1)
    output = bytes_answer.outputs[0]
    assert output.datatype == "BYTES"
    sizes = [int(size) for size in output.parameters["shape"].string_param.split(",")]
    unpacked = decode_raw("y", output.parameters["datatype"].string_param, sizes, output.contents.bytes_contents[0])
    assert np.array_equal(unpacked.array, ROWS + 1)


async def test_response_states_operating_point_and_seconds(ports, session):
    request = dataclasses.replace(a_request("pointed", x(ROWS), operating_point="less"), id="seven")
    began = time.monotonic()
    answer = await call(session, ports, request)
    assert answer.response is not None
    assert answer.response.id == "seven"
    assert answer.response.model_name == "pointed"
    assert answer.response.parameters["operating_point"] == "less"
    assert 0 < float(answer.response.parameters["compute_seconds"]) < time.monotonic() - began
    status, rest = await call_mlserver_rest(session, ports, "pointed", {"inputs": [ONE]})
    assert status == 200
    assert rest["parameters"]["operating_point"] == "full"
    assert rest["parameters"]["compute_seconds"] > 0


async def test_many_at_once_each_get_their_own(ports, session):
    batches = [np.full((1, 8), n, np.float32) for n in range(60)]
    answers = await asyncio.gather(*(call(session, ports, a_request("quick", x(batch))) for batch in batches))
    assert all(np.array_equal(answer.y, batch + 1) for answer, batch in zip(answers, batches, strict=True))


async def test_large_tensors_cross_whole(ports, session):
    batch = np.random.default_rng(1).random((8, 1_500_000), np.float32)  # 48 MB
    assert np.array_equal((await call(session, ports, a_request("quick", x(batch)))).y, batch + 1)


async def test_invalid_tensor_is_rejected_alike_on_every_port(ports, session):
    """Concurrent batches are not affected."""
    message = "input 'x' came as FP64; send FP32 [rows, any]"
    request = a_request("quick", Tensor.of("x", ROWS.astype("f8")))
    beside = call(session, ports, a_request("quick", x(ROWS)))
    answer, unharmed = await asyncio.gather(call(session, ports, request), beside)
    assert answer.status == 400
    assert message in answer.error
    assert np.array_equal(unharmed.y, ROWS + 1)
    entry = {"name": "x", "datatype": "FP64", "shape": [3, 4], "data": ROWS.ravel().tolist()}
    status, rest = await call_mlserver_rest(session, ports, "quick", {"inputs": [entry]})
    assert status == 400
    assert message in rest["error"]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call_mlserver_grpc(ports, request)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert message in (refused.value.details() or "")


async def test_unknown_names(ports, session):
    answer = await call(session, ports, a_request("absent", x(ROWS)))
    assert (answer.status, answer.error) == (404, "no model 'absent' here; loaded: pointed, quick, slow")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call_mlserver_grpc(ports, a_request("absent", x(ROWS)))
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("headers", [{}, {HEADER_LENGTH: "99"}])
async def test_body_that_is_no_request_is_rejected(ports, session, headers):
    assert (await post(session, ports, "quick", b"no json", headers)).status == 400


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_too_large(ports, session, declared):
    size = 64 * 2**20 + 1

    async def pieces():
        for _ in range(65):
            yield bytes(2**20)

    try:
        answer = await post(session, ports, "quick", io.BytesIO(bytes(size)) if declared else pieces(), {})
    except aiohttp.ClientConnectionError:  # refused before all of it was sent
        return
    assert answer.status == 413
    assert "is too large; send at most 67108864 bytes" in answer.error


async def test_packed_tensor_with_wrong_size_is_rejected(ports):
    message = packed("quick", ROWS)
    message.inputs[0].parameters["shape"].string_param = "3,5"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call_mlserver_grpc_raw(ports, message)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "shape [3, 5] of FP32 needs 60 bytes" in (refused.value.details() or "")


async def test_packed_answers_need_grpc(ports, session):
    payload = {"inputs": [ONE], "parameters": {"raw_output": True}}
    status, rest = await call_mlserver_rest(session, ports, "quick", payload)
    assert status == 400
    assert rest["error"].startswith("parameter 'raw_output' needs gRPC")


async def test_unknown_paths_and_methods(ports, session):
    base = f"http://127.0.0.1:{ports.data_port}"
    async with session.get(f"{base}/v3/nothing") as answer:
        assert answer.status == 404
        assert (await answer.json())["error"] == "nothing at /v3/nothing; try /v2/models/NAME/infer"
    async with session.get(f"{base}/v2/models/quick/infer") as answer:
        assert (answer.status, (await answer.json())["error"]) == (405, "GET /v2/models/quick/infer: infer takes POST")


async def test_non_http_client_does_no_harm(ports, session):
    with socket.create_connection(("127.0.0.1", ports.data_port)) as client:
        client.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert client.recv(12) == b"HTTP/1.0 400"
    assert (await call(session, ports, a_request("quick", x(ROWS)))).status == 200


async def test_metadata_describes_the_model(ports, session):
    for port in (ports.data_port, ports.http_port):
        async with session.get(f"http://127.0.0.1:{port}/v2/models/pointed") as answer:
            metadata = await answer.json()
        assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}]
        assert metadata["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, -1]}]
        assert metadata["parameters"] == {
            "family": "echo",
            "weights": "none",
            "accuracy": 0.9,
            "operating_points": "full,less",
            "max_batch_size": 8,
            "threads": 1,
        }


async def test_health_answers_while_a_batch_computes(start, session, tmp_path):
    """The batch computes until all answers are there."""
    ports, gate = start(write_echoes(tmp_path), serve_gated).ports, Gate(tmp_path)
    gate.shut()
    batch = asyncio.create_task(call(session, ports, a_request("slow", x(ROWS))))
    await gate.begun()
    for port in (ports.data_port, ports.http_port):
        for path in ("live", "ready"):
            assert await quickest_health(session, port, path) < 0.1
    assert not batch.done()
    gate.open()
    assert np.array_equal((await batch).y, ROWS + 1)


async def quickest_health(session, port: int, path: str) -> float:
    """The seconds of the quickest of a few answers: any one may be held up by the machine."""
    took = []
    for _ in range(10):
        began = time.monotonic()
        async with session.get(f"http://127.0.0.1:{port}/v2/health/{path}") as answer:
            assert answer.status == 200
        took.append(time.monotonic() - began)
    return min(took)
