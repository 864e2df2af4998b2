"""The clients: one request over REST or gRPC, through the router, to the model servers, or along plain MLServers.

Each is the load tester's own wire, which costs less than what it calls.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np

from benchmarks.router.processes import HOST, Chained, Served
from trimtab_loadtester.clients import CHANNELS, Client, GrpcClient, RestClient
from trimtab_protocol import Tensor

Send = Callable[[], Awaitable[str]]
"""Sends one request, checks its answer, returns its code: `ok`, or the HTTP or gRPC status."""


def rest(port: int) -> Client:
    """REST with binary tensors."""
    return RestClient(f"{HOST}:{port}", "echo")


def grpc(port: int, channels: int = CHANNELS) -> Client:
    """Over gRPC with raw tensors."""
    return GrpcClient(f"{HOST}:{port}", "echo", channels=channels)


@asynccontextmanager
async def rest_client(target: Served, numbers: int) -> AsyncIterator[Send]:
    """Through the router over REST."""
    async with _ahead(rest(target.rest_port), numbers) as send:
        yield send


@asynccontextmanager
async def grpc_client(target: Served, numbers: int) -> AsyncIterator[Send]:
    """Through the router over gRPC."""
    async with _ahead(grpc(target.grpc_port), numbers) as send:
        yield send


@asynccontextmanager
async def direct_client(target: Served, numbers: int, rows: int = 1) -> AsyncIterator[Send]:
    """Along the model servers' data ports, chained here: what the router is compared with for its overhead."""
    async with _along([rest(port) for port in target.data_ports], numbers, rows) as send:
        yield send


@asynccontextmanager
async def mlserver_client(target: Chained, numbers: int) -> AsyncIterator[Send]:
    """Along plain MLServers over gRPC with raw tensors, chained here."""
    async with _along([grpc(port, channels=1) for port in target.grpc_ports], numbers) as send:
        yield send


@asynccontextmanager
async def _ahead(wire: Client, numbers: int) -> AsyncIterator[Send]:
    """One request, encoded ahead."""
    x = _an_input(numbers)
    encoded = _encoded(wire, x)

    async def send() -> str:
        answer = await wire.send(encoded)
        return answer.code if answer.message is None else _checked(answer.message.outputs[0].array, x)

    async with wire:
        yield send


@asynccontextmanager
async def _along(wires: Sequence[Client], numbers: int, rows: int = 1) -> AsyncIterator[Send]:
    """One request after the other, each with what the one before was answered."""
    x = _an_input(numbers, rows)

    async def send() -> str:
        value = x
        for wire in wires:
            answer = await wire.send(_encoded(wire, value))
            if answer.message is None:
                return answer.code
            value = answer.message.outputs[0].array
        return _checked(value, x)

    async with AsyncExitStack() as stack:
        for wire in wires:
            await stack.enter_async_context(wire)
        yield send


def _an_input(numbers: int, rows: int = 1) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(rows * numbers, dtype=np.float32).reshape(rows, numbers)


def _encoded(wire: Client, x: Any) -> Any:
    parameters = {"binary_data_output": True} if isinstance(wire, RestClient) else {}
    return wire.encode((Tensor.of("x", x),), (), parameters)


def _checked(y: Any, x: Any) -> str:
    return "ok" if y.shape == x.shape and y[0, -1] == x[0, -1] + 2 else "wrong"
