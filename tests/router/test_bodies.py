"""Request bodies: reserved as they arrive, bounded in time and size, decoded only if served."""

import asyncio
import gzip
import json
import time
import zlib
from typing import Any

import aiohttp
import grpc
import pytest
from opentelemetry.trace import NoOpTracer
from yarl import URL

from tests.router.fakes import a_request, a_rig
from trimtab_protocol import grpc_messages, rest
from trimtab_router.admission.memory_budget import MemoryBudget
from trimtab_router.admission.uploads import Upload, Uploads
from trimtab_router.limits import MEBIBYTE, Limits
from trimtab_router.refusal import Refusal

HEAD = b"POST /v2/models/sample/infer HTTP/1.1\r\nHost: x\r\n"
ROW = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


async def send(rig, *parts: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.listeners.rest_port)
    for part in parts:
        writer.write(part)
    await writer.drain()
    return reader, writer


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return head


async def test_announced_bodies_do_not_block_others():
    limits = Limits(max_bytes_in_flight=4 * MEBIBYTE, max_payload_bytes=4 * MEBIBYTE, body_seconds=3600)
    async with a_rig(limits=limits) as rig:
        announced = HEAD + b"Inference-Header-Content-Length: 9\r\nContent-Length: 4194304\r\n\r\n"
        waiting = [await send(rig, announced) for _ in range(20)]
        await rig.until(lambda: rig.router.admission.memory.requests == 20)

        assert rig.router.admission.memory.active_requests == 0  # else they would count against the concurrency limit
        assert (await rig.rest(a_request()))[0] == 200
        assert rig.value("trimtab_bytes_in_flight") == 0
        for _, writer in waiting:
            writer.close()
            await writer.wait_closed()
        await rig.until(lambda: rig.router.admission.memory.requests == 0)


@pytest.mark.parametrize("framing", [b"Content-Length: 100\r\n\r\nx", b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n"])
async def test_a_body_that_does_not_come_is_given_up(framing):
    limits = Limits(body_seconds=0.2)
    async with a_rig(limits=limits) as rig:
        head = await answered(*await send(rig, HEAD + framing))

        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"x-trimtab-reason: BodyTimeout" in head
        await rig.until(lambda: rig.value("trimtab_bytes_in_flight") == 0)
        assert await rig.outcomes() == {"refused": 1}


async def test_a_body_slower_than_the_minimum_rate_is_refused(monkeypatch):
    monkeypatch.setattr("trimtab_router.admission.uploads.GRACE_SECONDS", 0.3)
    async with a_rig() as rig:
        reader, writer = await send(rig, HEAD + b"Content-Length: 1000\r\n\r\n")
        head = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        while not head.done():
            writer.write(b" ")
            await asyncio.sleep(0.02)
        assert (await head).startswith(b"HTTP/1.1 408 ")
        assert "slower than 8192 bytes per second" in (await reader.read()).decode()
        writer.close()


async def test_slowest_upload_of_the_largest_client_is_cut_first():
    """Of eight places six may be taken, of which a client may have two before its own uploads are cut first."""
    memory = MemoryBudget(MEBIBYTE)
    uploads = Uploads(memory, seconds=60.0)
    uploads.max_requests = lambda: 8
    arriving: dict[str, Upload] = {}
    cut: dict[str, str] = {}

    async def receive(name: str) -> None:
        try:
            with memory.reservation(name.partition("-")[0]) as reservation:
                async with uploads.receive(reservation) as upload:
                    arriving[name] = upload
                    await asyncio.Event().wait()
        except Refusal as refusal:
            cut[name] = refusal.reason

    async def start(*names: str) -> None:
        for name in names:
            tasks.append(asyncio.create_task(receive(name)))
            await asyncio.sleep(0.01)

    tasks: list[asyncio.Task[None]] = []
    await start("slow-0", "many-0", "many-1", "many-2", "other-0")
    assert cut == {}
    arriving["many-0"].note_bytes(1000)
    await start("other-1")
    assert list(cut) == ["many-1"]
    await start("other-2")
    assert cut == {"many-1": "BodyTimeout", "slow-0": "BodyTimeout"}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert memory.requests == 0


async def test_json_beyond_its_bound_is_sent_to_binary_tensors():
    limits = Limits(max_json_bytes=1000)
    async with a_rig(limits=limits) as rig:
        advice = "use binary tensors (extension binary_tensor_data)"
        for headers in ({}, {rest.HEADER_LENGTH: "1001"}):
            status, error, _ = await rig.post("sample", b" " * 2000, **headers)
            assert (status, error.endswith(advice)) == (413, True), error
        assert (await rig.rest(a_request(rows=500, parameters={"binary_data_output": True})))[0] == 200


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress, lambda data: zlib.compress(data)[2:-4]])
async def test_packed_bodies_are_unpacked(rig, pack):
    encoding = "gzip" if pack is gzip.compress else "deflate"
    status, answer, _ = await rig.post("sample", pack(json.dumps(ROW).encode()), **{"Content-Encoding": encoding})

    assert (status, answer.outputs[0].array.tolist()) == (200, [[2, 3, 4, 5]])
    assert rig.value("trimtab_bytes_in_flight") == 0


@pytest.mark.parametrize(
    ("body", "encoding", "message"),
    [
        (gzip.compress(b"{}", mtime=0)[:-3], "gzip", "the body is not one whole gzip stream"),
        (gzip.compress(b"{}", mtime=0) + b"more", "gzip", "the body is not one whole gzip stream"),
        (b"", "gzip", "the body is not one whole gzip stream"),
        (b"{}", "br", "the body has encoding 'br'; use gzip, deflate or none"),
        (b"{}", "gzip, gzip", "the body has encoding 'gzip, gzip'; use gzip, deflate or none"),
    ],
)
async def test_bodies_packed_otherwise_are_refused(rig, body, encoding, message):
    assert (await rig.post("sample", body, **{"Content-Encoding": encoding}))[:2] == (400, message)
    assert await rig.outcomes() == {"refused": 1}


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_empty_compressed_message_is_a_client_error(rig, encoding):
    await rig.proxy()
    headers = {"Content-Type": "application/grpc", "grpc-encoding": encoding}
    url = "http://router" + grpc_messages.method_path("ModelInfer")
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(rig.sockets.requests))) as session,
        session.post(url, data=b"\x01\0\0\0\0", headers=headers) as answer,
    ):
        assert answer.headers["grpc-status"] == str(grpc.StatusCode.INVALID_ARGUMENT.value[0])
        assert answer.headers["grpc-message"] == f"the message is not one whole {encoding} stream"
    assert await rig.outcomes() == {"refused": 1}


async def test_unpacked_bytes_count_while_they_are_unpacked():
    limits = Limits(max_bytes_in_flight=2 * MEBIBYTE, max_payload_bytes=64 * MEBIBYTE)
    async with a_rig(limits=limits) as rig:
        headers = {"Content-Encoding": "gzip", rest.HEADER_LENGTH: "100"}
        bomb = gzip.compress(bytes(32 * MEBIBYTE), mtime=0)
        status, error, answer_headers = await rig.post("sample", bomb, **headers)

        assert (status, answer_headers["x-trimtab-reason"]) == (429, "BytesInFlight"), error
        assert rig.value("trimtab_bytes_in_flight") == 0


async def test_description_is_validated_before_decoding(rig):
    tensor = {"name": "z", "shape": [1, 4], "datatype": "FP32", "data": ["no", "numbers", "at", "all"]}
    for model, status, message in (("no-such", 404, "unknown model 'no-such'"), ("sample", 400, "unknown input")):
        found, error, _ = await rig.post(model, json.dumps({"inputs": [tensor]}).encode())
        assert (found, error.startswith(message)) == (status, True)


class BrokenTracer(NoOpTracer):
    """An unexpected internal error."""

    def start_span(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("pod-7 has lost its way")


async def test_internal_errors_leak_nothing_and_forge_no_log(caplog):
    async with a_rig(tracer=BrokenTracer()) as rig:
        path = "/v2/models/sample/infer"
        url = URL(f"{rig.url}{path}%0A2025%20CRITICAL%20all%20is%20lost/infer", encoded=True)
        async with rig.session.post(url, data=b"{}") as answer:
            assert answer.status == 404
        status, error, _ = await rig.post("sample", json.dumps(ROW).encode(), **{"x-request-id": "r-1"})

        assert (status, error) == (500, "the request failed; see the router's log for request id 'r-1'")
        assert "pod-7 has lost its way" in caplog.text
        assert all("\n" not in record.getMessage() for record in caplog.records)


def slow_to_decode() -> bytes:
    data = [0.123456789] * 4000
    return json.dumps({"inputs": [{"name": "x", "shape": [1000, 4], "datatype": "FP32", "data": data}]}).encode()


async def test_body_completed_while_draining_is_refused(rig):
    body = slow_to_decode()
    opened = await send(rig, HEAD + b"Content-Length: %d\r\n\r\n" % len(body), body[:-100])
    await rig.until(lambda: rig.value("trimtab_bytes_in_flight") > 0)
    await rig.router.drain(1.0)
    opened[1].write(body[-100:])
    head = await answered(*opened)

    assert head.startswith(b"HTTP/1.1 503 "), head
    assert b"\r\nRetry-After: 1\r\n" in head
    assert b"x-trimtab-reason: Draining" in head
    assert await rig.outcomes() == {"refused": 1}


async def test_queued_decoding_finishes_while_draining(rig):
    pending = rest.read_request("sample", slow_to_decode(), None)
    reservations = [await rig.router.admission.admit(time.monotonic()) for _ in range(8)]
    decoding = [asyncio.ensure_future(rig.router.admission.parse(pending, each)) for each in reservations]
    await asyncio.sleep(0)
    await rig.router.drain(1.0)

    assert [len(admitted.inputs["x"]) for admitted in await asyncio.gather(*decoding)] == [1000] * 8
    for reservation in reservations:
        reservation.end()
