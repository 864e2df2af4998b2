"""Responses and streams of replicas, matched to their batches however a connection misbehaves."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from aiohttp import web
from aiohttp.base_protocol import BaseProtocol
from aiohttp.streams import StreamReader
from aiohttp.test_utils import make_mocked_request

from tests.router.chats import ChatReplica
from tests.router.fakes import PATIENT, FakeReplica, a_call, a_pipeline, a_request, a_rig
from trimtab_protocol import Tensor, rest
from trimtab_protocol.chat.internal_wire import Chunk
from trimtab_protocol.http_client import ConnectionLost, HttpConnection, request_head
from trimtab_router.ingress.base import request_id
from trimtab_router.ingress.rest import RestIngress
from trimtab_router.scheduling.replica_slots import BatchOutcome, Completed, ReplicaLost
from trimtab_router.transport.stream_client import StreamClient, StreamRequest, read_events

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


async def test_exchange_without_response_ends_at_its_deadline():
    async def silent(writer: asyncio.StreamWriter) -> None:
        await writer.drain()

    async with a_server(silent) as connection:
        deadline = asyncio.get_running_loop().time() + 0.05
        with pytest.raises(TimeoutError):
            await connection.exchange(request_head("GET", "/", "x", {}, 0), deadline=deadline)
        assert asyncio.get_running_loop().time() >= deadline
        assert not connection.usable


async def test_each_exchange_of_a_connection_has_its_deadline():
    async def once(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    async with a_server(once) as connection:
        loop, head = asyncio.get_running_loop(), request_head("GET", "/", "x", {}, 0)
        await connection.exchange(head, deadline=loop.time() + 0.05)
        assert connection.usable
        later = loop.time() + 0.2  # the timer of the first exchange is still set
        with pytest.raises(TimeoutError):
            await connection.exchange(head, deadline=later)
        assert loop.time() >= later - 0.01


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


OTHERS = 8
CHAT = b'[{"role": "user", "content": [{"type": "text", "text": "a"}]}]'


def written(text: str) -> bytes:
    return b'data: {"text": "%s", "tokens": 1}\n\n' % text.encode()


def opened() -> StreamReader:
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.connection_made(asyncio.Transport())
    return StreamReader(protocol, 2**16, loop=loop)


async def listen(stream: StreamReader, reply: "asyncio.Queue[str]") -> None:
    async with asyncio.timeout(30) as patience:
        response = cast("Any", SimpleNamespace(content=stream))
        async for piece in read_events(response, patience, 30.0, 2**20, StreamRequest("/", b"")):
            assert isinstance(piece, Chunk)
            asyncio.get_running_loop().call_soon(reply.put_nowait, piece.text)


async def test_an_answer_that_begins_goes_ahead_of_those_that_go_on():
    reply, others, last = asyncio.Queue[str](), [opened() for _ in range(OTHERS)], opened()
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for stream in (*others, last):
            group.create_task(listen(stream, reply))
        for stream in others:
            stream.feed_data(written("begins"))
        assert [await reply.get() for _ in others] == ["begins"] * OTHERS

        for stream in others:
            stream.feed_data(written("goes on"))
        last.feed_data(written("begins"))  # in the same moment, and the last to be read

        assert [await reply.get() for _ in (*others, last)] == ["begins", *["goes on"] * OTHERS]
        for stream in (*others, last):
            stream.feed_eof()


async def generate_at(port: int, begin_seconds: float, messages: bytes = CHAT) -> BatchOutcome:
    tensor = Tensor("messages", "BYTES", np.array([messages], object))
    body, length = rest.encode_batch([[tensor]], {}, "r")
    headers = {rest.HEADER_LENGTH: str(length)}
    streams = StreamClient("replica-0", f"127.0.0.1:{port}", lambda: None)
    try:
        return await streams.generate(
            StreamRequest("/v2/models/small/generate_stream", b"".join(body), headers),
            point="default",
            begin_seconds=begin_seconds,
            gap_seconds=30.0,
            max_bytes=2**20,
            merges=True,
            on_chunk=lambda _: None,
        )
    finally:
        await streams.close()


async def test_a_replica_that_dies_or_hangs_over_what_it_read_had_it():
    replica = ChatReplica(dies_reading=True)
    await replica.start()
    died = await generate_at(replica.port, 30.0)
    replica.dies_reading = False
    replica.gate.clear()
    hung = await generate_at(replica.port, 1.0)
    await replica.stop()

    assert [isinstance(lost, ReplicaLost) and lost.delivered for lost in (died, hung)] == [True, True]
    assert len(replica.written) == 2


async def test_a_replica_that_cannot_be_reached_did_not_have_it():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        ending = await generate_at(bound.getsockname()[1], 30.0)

    assert isinstance(ending, ReplicaLost)
    assert not ending.delivered


async def test_a_large_chat_arrives_whole():
    """A library's warning that it would hold up the loop would be an error here."""
    replica = ChatReplica()
    await replica.start()
    said = [{"role": "user", "content": [{"type": "text", "text": text}]} for text in ("a" * 2**21, "b")]
    ending = await generate_at(replica.port, 30.0, json.dumps(said).encode())
    await replica.stop()

    assert isinstance(ending, Completed), ending
    assert replica.written[0].messages == said
