"""Clients of the router benchmark, sending to the router or to chained model servers, and the loops that drive them."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.router.processes import HOST, Served, usage
from trimtab_loadtester.clients import Client, RestClient
from trimtab_loadtester.grpc_client import GrpcClient
from trimtab_protocol import Tensor

Session = AbstractAsyncContextManager[Callable[[], Awaitable[str]]]
Send = Callable[[], Awaitable[str]]
"""Sends one request, checks its response, returns its code: `ok`, or the HTTP or gRPC status."""


def rest_client(target: Served, numbers: int) -> Session:
    return _encoded_once(RestClient(f"{HOST}:{target.rest_port}", "echo"), numbers)


def grpc_client(target: Served, numbers: int) -> Session:
    return _encoded_once(GrpcClient(f"{HOST}:{target.grpc_port}", "echo"), numbers)


def direct_client(target: Served, numbers: int, rows: int = 1) -> Session:
    """Chain the model servers' data ports in the client: the baseline of the router's overhead."""
    return _chained([RestClient(f"{HOST}:{port}", "echo") for port in target.data_ports], numbers, rows)


def mlserver_client(target: Served, numbers: int) -> Session:
    """Chain plain MLServers over gRPC with raw tensors in the client."""
    return _chained([GrpcClient(f"{HOST}:{port}", "echo", channels=1) for port in target.data_ports], numbers)


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


@dataclass(slots=True)
class Tally:
    """Codes, latencies of successful responses, and resource usage of the watched processes."""

    wall_seconds: float = 0.0
    codes: Counter[str] = field(default_factory=Counter)
    ok_seconds: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def goodput_rps(self) -> float:
        return self.codes["ok"] / self.wall_seconds

    def quantile_ms(self, quantile: float) -> float:
        ordered = sorted(self.ok_seconds)
        return 1000 * ordered[min(int(quantile * len(ordered)), len(ordered) - 1)] if ordered else float("nan")

    def figures(self, prefix: str) -> dict[str, float]:
        return {
            f"{prefix}_rps": round(self.goodput_rps, 1),
            f"{prefix}_p50_ms": round(self.quantile_ms(0.5), 3),
            f"{prefix}_p99_ms": round(self.quantile_ms(0.99), 3),
            f"{prefix}_cpu_seconds_per_1000": round(1000 * self.cpu_seconds / max(self.codes["ok"], 1), 3),
            f"{prefix}_peak_mib": round(self.peak_bytes / 2**20, 1),
        }


async def closed_loop(
    send: Send, concurrency: int, seconds: float, watched: tuple[int, ...], warmup_seconds: float = 1.0
) -> Tally:
    """Run callers that each send the next request after a response; responses after the warm-up count."""
    tally = Tally(wall_seconds=seconds)
    begin = time.monotonic() + warmup_seconds
    end = begin + seconds

    async def caller() -> None:
        while (sent := time.monotonic()) < end:
            code = await send()
            if begin <= time.monotonic() < end:
                _count(tally, code, sent)

    async def measure() -> None:
        await asyncio.sleep(warmup_seconds)
        before = usage(watched).cpu_seconds
        await asyncio.sleep(seconds)
        after = usage(watched)
        tally.cpu_seconds, tally.peak_bytes = after.cpu_seconds - before, after.peak_bytes

    await asyncio.gather(measure(), *(caller() for _ in range(concurrency)))
    return tally


async def open_loop(send: Send, rate_rps: float, seconds: float, watched: tuple[int, ...], slo_seconds: float) -> Tally:
    """Send Poisson arrivals at a rate; a response later than the SLO counts as `late`."""
    tally = Tally(wall_seconds=seconds)
    draw = random.Random(0)  # noqa: S311 - arrivals, not secrets
    before = usage(watched).cpu_seconds
    in_flight: set[asyncio.Task[None]] = set()

    async def send_one(due: float) -> None:
        code = await send()
        late = code == "ok" and time.monotonic() - due > slo_seconds
        _count(tally, "late" if late else code, due)

    due = begin = time.monotonic()
    while due < begin + seconds:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        task = asyncio.create_task(send_one(due))
        in_flight.add(task)
        task.add_done_callback(in_flight.discard)
        due += draw.expovariate(rate_rps)
    await asyncio.gather(*in_flight)
    after = usage(watched)
    tally.cpu_seconds, tally.peak_bytes = after.cpu_seconds - before, after.peak_bytes
    return tally


def _count(tally: Tally, code: str, sent: float) -> None:
    tally.codes[code] += 1
    if code == "ok":
        tally.ok_seconds.append(time.monotonic() - sent)
