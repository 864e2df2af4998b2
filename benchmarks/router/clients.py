"""The clients: one request over REST or gRPC, through the router, to the model servers, or along plain MLServers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np

from benchmarks.router.processes import Chained, Served
from trimtab_protocol import InferRequest, Tensor, rest
from trimtab_protocol.grpc_messages import (
    method_path,
    request_to_message,
    response_class,
    response_from_message,
)
from trimtab_protocol.http import HttpConnection, Reply, request_head

Send = Callable[[], Awaitable[str]]
"""Sends one request, checks its answer, returns its code: `ok`, or the HTTP or gRPC status."""

_CHANNELS = 4
_OPTIONS = [
    ("grpc.max_send_message_length", 2**28),
    ("grpc.max_receive_message_length", 2**28),
    ("grpc.use_local_subchannel_pool", 1),
]


class RestConnections:
    """Keep-alive connections to one port, as many as requests are under way."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[HttpConnection] = []

    async def exchange(self, head: bytes, body: list[Any]) -> Reply:
        """Send one request."""
        connection = self._idle.pop() if self._idle else None
        if connection is None or not connection.usable:
            connection = await HttpConnection.open("127.0.0.1", self._port)
        reply = await connection.exchange(head, body)
        if connection.usable:
            self._idle.append(connection)
        return reply

    def close(self) -> None:
        """Close those that are idle."""
        for connection in self._idle:
            connection.close()


def an_input(numbers: int, rows: int = 1) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows of distinct numbers."""
    return np.arange(rows * numbers, dtype=np.float32).reshape(rows, numbers)


def encode(model: str, x: Any) -> tuple[bytes, list[Any]]:
    """Head and body of a REST request with binary tensors."""
    request = InferRequest(model, (Tensor.of("x", x),), parameters={"binary_data_output": True})
    body, header_length = rest.encode_request(request)
    size = sum(memoryview(buffer).nbytes for buffer in body)
    headers = {rest.HEADER_LENGTH: str(header_length), "Content-Type": rest.BINARY_CONTENT_TYPE}
    return request_head("POST", f"/v2/models/{model}/infer", "127.0.0.1", headers, size), body


def result(reply: Reply) -> Any:
    """The first output of an answer."""
    return rest.decode_response(reply.body, reply.headers[rest.HEADER_LENGTH.lower()]).outputs[0].array


@asynccontextmanager
async def rest_client(target: Served, numbers: int) -> AsyncIterator[Send]:
    """Through the router over REST."""
    x = an_input(numbers)
    head, body = encode("echo", x)
    connections = RestConnections(target.rest_port)

    async def send() -> str:
        reply = await connections.exchange(head, body)
        if reply.status != 200:
            return str(reply.status)
        return _checked(result(reply), x)

    yield send
    connections.close()


@asynccontextmanager
async def grpc_client(target: Served, numbers: int) -> AsyncIterator[Send]:
    """Through the router over gRPC."""
    x = an_input(numbers)
    message = request_to_message(InferRequest("echo", (Tensor.of("x", x),))).SerializeToString()
    async with _channels([target.grpc_port] * _CHANNELS) as calls:
        turn = 0

        async def send() -> str:
            nonlocal turn
            turn = (turn + 1) % len(calls)
            try:
                raw = await calls[turn](message)
            except grpc.aio.AioRpcError as error:
                return str(error.code().name)
            return _checked(response_from_message(response_class("ModelInfer").FromString(raw)).outputs[0].array, x)

        yield send


@asynccontextmanager
async def direct_client(target: Served, numbers: int, rows: int = 1) -> AsyncIterator[Send]:
    """Along the model servers' data ports, chained here: what the router is compared with for its overhead."""
    x = an_input(numbers, rows)
    hops = [RestConnections(port) for port in target.data_ports]

    async def send() -> str:
        value = x
        for hop in hops:
            value = result(await hop.exchange(*encode("echo", value)))
        return _checked(value, x)

    yield send
    for hop in hops:
        hop.close()


@asynccontextmanager
async def mlserver_client(target: Chained, numbers: int) -> AsyncIterator[Send]:
    """Along plain MLServers over gRPC with raw tensors, chained here."""
    x = an_input(numbers)
    async with _channels(list(target.grpc_ports)) as calls:

        async def send() -> str:
            value = x
            for call in calls:
                message = request_to_message(InferRequest("echo", (Tensor.of("x", value),)))
                raw = await call(message.SerializeToString())
                value = response_from_message(response_class("ModelInfer").FromString(raw)).outputs[0].array
            return _checked(value, x)

        yield send


@asynccontextmanager
async def _channels(ports: list[int]) -> AsyncIterator[list[Any]]:
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS) for port in ports]
    yield [channel.unary_unary(method_path("ModelInfer"), None, None) for channel in channels]
    await asyncio.gather(*(channel.close(None) for channel in channels))


def _checked(y: Any, x: Any) -> str:
    return "ok" if y.shape == x.shape and y[0, -1] == x[0, -1] + 2 else "wrong"
