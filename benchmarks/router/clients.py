"""Clients of the router benchmark: the load tester's clients, sending to the router, or to chained model servers."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np

from benchmarks.router.processes import HOST, ChainedServers, Served
from trimtab_loadtester.clients import CHANNELS, Client, GrpcClient, RestClient
from trimtab_protocol import Tensor

Send = Callable[[], Awaitable[str]]
"""Sends one request, checks its response, returns its code: `ok`, or the HTTP or gRPC status."""


def rest(port: int) -> Client:
    return RestClient(f"{HOST}:{port}", "echo")


def grpc(port: int, channels: int = CHANNELS) -> Client:
    return GrpcClient(f"{HOST}:{port}", "echo", channels=channels)


@asynccontextmanager
async def rest_client(target: Served, numbers: int) -> AsyncIterator[Send]:
    async with _encoded_once(rest(target.rest_port), numbers) as send:
        yield send


@asynccontextmanager
async def grpc_client(target: Served, numbers: int) -> AsyncIterator[Send]:
    async with _encoded_once(grpc(target.grpc_port), numbers) as send:
        yield send


@asynccontextmanager
async def direct_client(target: Served, numbers: int, rows: int = 1) -> AsyncIterator[Send]:
    """Chain the model servers' data ports in the client: the baseline of the router's overhead."""
    async with _chained([rest(port) for port in target.data_ports], numbers, rows) as send:
        yield send


@asynccontextmanager
async def mlserver_client(target: ChainedServers, numbers: int) -> AsyncIterator[Send]:
    """Chain plain MLServers over gRPC with raw tensors in the client."""
    async with _chained([grpc(port, channels=1) for port in target.grpc_ports], numbers) as send:
        yield send


@asynccontextmanager
async def _encoded_once(client: Client, numbers: int) -> AsyncIterator[Send]:
    """Send one request that is encoded before the measurement."""
    x = _input(numbers)
    encoded = _encode(client, x)

    async def send() -> str:
        response = await client.send(encoded)
        return response.code if response.message is None else _check(response.message.outputs[0].array, x)

    async with client:
        yield send


@asynccontextmanager
async def _chained(clients: Sequence[Client], numbers: int, rows: int = 1) -> AsyncIterator[Send]:
    """Send each server the output of the one before."""
    x = _input(numbers, rows)

    async def send() -> str:
        value = x
        for client in clients:
            response = await client.send(_encode(client, value))
            if response.message is None:
                return response.code
            value = response.message.outputs[0].array
        return _check(value, x)

    async with AsyncExitStack() as stack:
        for client in clients:
            await stack.enter_async_context(client)
        yield send


def _input(numbers: int, rows: int = 1) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(rows * numbers, dtype=np.float32).reshape(rows, numbers)


def _encode(client: Client, x: Any) -> Any:
    parameters = {"binary_data_output": True} if isinstance(client, RestClient) else {}
    return client.encode((Tensor.of("x", x),), (), parameters)


def _check(y: Any, x: Any) -> str:
    return "ok" if y.shape == x.shape and y[0, -1] == x[0, -1] + 2 else "wrong"
