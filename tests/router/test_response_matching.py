"""Responses over REST and gRPC, matched to their batches however a connection misbehaves."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from tests.router.fakes import PATIENT, FakeReplica, a_call, a_pipeline, a_request, a_rig
from trimtab_protocol.http_client import ConnectionLost, HttpConnection, request_head
from trimtab_router.ingress.base import request_id
from trimtab_router.ingress.rest import RestIngress

NASTY = "a\r\nx-evil: 1"


class OneOff(FakeReplica):
    """Answers each batch with the answer to the one before it, while `behind` holds one."""

    async def start(self) -> "OneOff":
        self.behind: list[web.StreamResponse] = []
        self.shifted = False
        await super().start()
        return self

    async def answer_request(self, request: web.BaseRequest) -> web.StreamResponse:
        answer = await super().answer_request(request)
        if not self.shifted or not request.path.endswith("/infer"):
            return answer
        self.behind.append(answer)
        late = self.behind.pop(0) if len(self.behind) > 1 else answer
        return web.Response(body=late.body, status=late.status, headers={**late.headers})  # type: ignore[attr-defined]


@asynccontextmanager
async def a_server(answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[HttpConnection]:
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await answer(writer)
        await writer.drain()
        await over.wait()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        connection = await HttpConnection.open("127.0.0.1", server.sockets[0].getsockname()[1])
        try:
            yield connection
        finally:
            connection.close()
            await connection.closed
            over.set()
            await asyncio.sleep(0)


async def test_both_front_doors_serve_two_stages():
    async with a_rig(a_pipeline(2), {"stage-0": [FakeReplica()], "stage-1": [FakeReplica()]}) as rig:
        status, answer, _ = await rig.rest(a_request(rows=3, value=5.0, id="7"))
        np.testing.assert_array_equal(answer.outputs[0].array, np.full((3, 4), 7.0))
        assert (status, answer.id, answer.model_name, answer.outputs[0].name) == (200, "7", "sample", "y")
        assert answer.parameters["trimtab.stage-1.variant"] == "small"
        assert answer.parameters["trimtab.stage-0.batch_size"] == 3
        assert answer.parameters["trimtab.plan_generation"] == 1
        assert answer.parameters["trimtab.expected_accuracy"] == pytest.approx(0.81)

        answer = await rig.grpc(a_request(rows=2, value=1.0, id="8"))
        np.testing.assert_array_equal(answer.outputs[0].array, np.full((2, 4), 3.0))
        assert answer.id == "8"
        assert 0 <= float(answer.parameters["trimtab.stage-0.queue_seconds"]) < 1

        assert await rig.outcomes() == {"ok": 2}


async def test_response_to_another_batch_is_discarded():
    replica = OneOff()
    async with a_rig(a_pipeline(1), {"stage-0": [replica]}, batchSize=1) as rig:
        replica.shifted = True
        for number in range(3):
            status, answer, _ = await rig.rest(a_request(value=float(number), parameters=PATIENT))
            if status == 200:
                np.testing.assert_array_equal(answer.outputs[0].array, np.full((1, 4), number + 1))
            else:
                assert answer == "stage stage-0: its model server failed; see the router's log"
        replica.shifted = False
        await rig.until_ready()
        status, answer, _ = await rig.rest(a_request(value=7.0, parameters=PATIENT))

        np.testing.assert_array_equal(answer.outputs[0].array, np.full((1, 4), 8))
        assert len({batch.id for batch in replica.seen}) == len(replica.seen)


async def test_connection_with_extra_data_is_closed():
    more = asyncio.Event()

    async def talkative(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na")
        await writer.drain()
        await more.wait()
        writer.write(b"H")  # as little as one byte would be taken for the beginning of the next answer

    async with a_server(talkative) as connection:
        reply = await connection.exchange(request_head("GET", "/", "x", {}, 0))
        assert (bytes(reply.body), connection.usable) == (b"a", True)

        more.set()
        await connection.closed
        assert not connection.usable


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 2147483647",
        b"Content-Length: 1\r\nContent-Length: 2",
        b"Content-Length: 1\r\nTransfer-Encoding: chunked",
        b"Content-Length: +1",
        b"Content-Length: " + b"1" * 5000,
    ],
)
async def test_oversized_or_ambiguous_response_closes_connection(head):
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\na")

    async with a_server(answer) as connection:
        with pytest.raises(ConnectionLost):
            await connection.exchange(request_head("GET", "/", "x", {}, 0), max_body_bytes=1000)

        assert not connection.usable


@pytest.mark.parametrize("value", [NASTY, "a\0", "a\n", "\r", "€", "\x7f", "\x80"])
def test_heads_of_requests_hold_printable_ascii_only(value):
    for headers, path in (({"x-request-id": value}, "/"), ({value: "a"}, "/"), ({}, value)):
        with pytest.raises(ValueError, match="cannot stand in the head of a request"):
            request_head("POST", path, "host", headers, 0)


@pytest.mark.parametrize("name", ["x-request-id", "traceparent"])
@pytest.mark.parametrize("value", ["€", "i" * 8000, "é", "a b"])
async def test_odd_request_ids_harm_no_request(rig, replica, name, value):
    first = await rig.hold(replica)
    calls = [asyncio.ensure_future(rig.rest(a_request(parameters=PATIENT), **{name: value})) for _ in range(7)]
    calls.append(asyncio.ensure_future(rig.rest(a_request(parameters=PATIENT), **{name: "plain"})))
    await rig.until(lambda: rig.router.state().stages["stage-0"].queue_rows == 8)
    replica.gate.set()

    assert [(await call)[0] for call in (first, *calls)] == [200] * 9
    assert sum(batch.rows for batch in replica.seen) == 9  # none was sent again
    assert all(len(result) <= 8 * 129 for batch in replica.seen for result in batch.headers.values())


async def test_request_ids_cannot_inject_headers(rig, replica):
    call = a_call(rig.router.pipeline, a_request(), time.monotonic())
    request = make_mocked_request("POST", "/", headers={"x-request-id": NASTY, "traceparent": NASTY})
    reservation = await rig.router.admission.admit(call.arrived_at)
    RestIngress(rig.router).describe(call, request, reservation, call.arrived_at, request_id(request))
    await rig.router.infer(call)

    (batch,) = replica.seen
    assert batch.headers["x-request-id"] == "a??x-evil: 1"
    assert {"x-evil", "traceparent"}.isdisjoint(batch.headers)
