"""The friendly callers, a process of their own: REST and gRPC in turn, 20 a second whatever the answers do.

`python -m benchmarks.hostile.friendly` also asks for the router's health 20 times a second. It writes one JSON line for
each request and each probe until it is told to stop. What the machine took meanwhile is noted beside: how late this
process's own loop was, and how long the router waited for a core.
"""

import argparse
import asyncio
import itertools
import json
import math
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import aiohttp
import numpy as np

from benchmarks.hostile.door import HEALTH, MODEL
from trimtab_loadtester.clients import Client, GrpcClient, RestClient
from trimtab_protocol import Tensor

NUMBERS = 4
PATIENCE_SECONDS = 10.0
TICK_SECONDS = 0.01
MOST_NUMBER = 2**23
"""Below it, FP32 tells whole numbers apart."""


@dataclass(slots=True)
class Lateness:
    """How late this process's own loop was, so that its stops are not taken for the router's."""

    ticks: list[tuple[float, float]] = field(default_factory=list)

    async def watch(self) -> None:
        """Note every stop longer than a tick."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            if now - last > 3 * TICK_SECONDS:
                self.ticks.append((now, now - last - TICK_SECONDS))
            last = now

    def since(self, began: float) -> float:
        """Seconds this loop stood still since then."""
        total = 0.0
        for ended, seconds in reversed(self.ticks):
            if ended < began:
                break
            total += seconds
        return total


def schedule_seconds(task: int | str) -> tuple[float, float]:
    """How long a process's first thread, or a thread, has run and waited for a core so far."""
    try:
        ran, waited, _ = Path(f"/proc/{task}/schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return math.inf, 0.0
    return int(ran) / 1e9, int(waited) / 1e9


def waited_seconds(pids: Iterable[int]) -> float:
    """How long all threads of these processes have waited for a core so far."""
    return sum(schedule_seconds(f"{pid}/task/{thread}")[1] for pid in pids for thread in threads(pid))


def threads(pid: int) -> list[str]:
    """The ids of a process's threads; none where it has ended."""
    with suppress(OSError):
        return [thread.name for thread in Path(f"/proc/{pid}/task").iterdir()]
    return []


async def asked(wire: Client, number: int) -> str:
    """Send a request that nobody else sends; `ok` for its own answer."""
    named, x = f"friend-{number}", np.full((1, NUMBERS), number, np.float32)
    request = wire.encode((Tensor.of("x", x),), (), {"binary_data_output": bool(number % 4)}, named)
    answer = await wire.send(request, named)
    if answer.message is None:
        code = "wrong:" if answer.code == "ProtocolError" else answer.code
        return code if code.isdigit() else f"{code} {answer.detail}"[:100]
    y = answer.message.outputs[0].array
    own = y.shape == (1, NUMBERS) and bool((y == number + 2).all()) and answer.message.id == named
    return "ok" if own and answer.headers.get("x-request-id", named) == named else "wrong"


async def told(asking: Awaitable[str]) -> str:
    """How a request ended, in a word."""
    try:
        return await asyncio.wait_for(asking, PATIENCE_SECONDS)
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        return f"{type(error).__name__} {error}"[:100]


@dataclass(slots=True)
class Log:
    """Writes the lines."""

    file: TextIO
    lateness: Lateness
    router: int
    parts: list[int]

    async def note(self, wire: str, asking: Awaitable[str]) -> None:
        """Wait for a request's end and write it down."""
        began, (ran, waited), all_waited = time.monotonic(), schedule_seconds(self.router), waited_seconds(self.parts)
        code = await told(asking)
        seconds = time.monotonic() - began
        ran_since, waited_since = schedule_seconds(self.router)
        stolen = min(max(self.lateness.since(began), waited_since - waited), seconds)
        busy = min(ran_since - ran, seconds) if ran_since >= ran else seconds
        line = {"wire": wire, "at": began, "seconds": seconds, "stolen_seconds": stolen, "busy_seconds": busy}
        line |= {"code": code, "all_waited_seconds": waited_seconds(self.parts) - all_waited}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()


async def every(seconds: float, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Act at a steady pace, whether the earlier acts have ended or not."""
    due = time.monotonic()
    async with asyncio.TaskGroup() as under_way:
        while True:
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            under_way.create_task(act())
            due = max(due + seconds, time.monotonic() - seconds)


async def befriend(given: argparse.Namespace) -> None:
    """Send and probe until SIGTERM."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    lateness, numbers = Lateness(), itertools.cycle(range(1, MOST_NUMBER))
    async with (
        RestClient(f"127.0.0.1:{given.rest_port}", MODEL) as rest,
        GrpcClient(f"127.0.0.1:{given.grpc_port}", MODEL, channels=1) as grpc,
        aiohttp.ClientSession() as probing,
    ):
        with given.out as file:
            log = Log(file, lateness, given.router, [given.router, *given.part])

            async def request() -> None:
                number = next(numbers)
                name, wire = ("rest", rest) if number % 2 else ("grpc", grpc)
                await log.note(name, asked(wire, number))

            async def health() -> str:
                async with probing.get(f"{given.admin}{HEALTH}") as answer:
                    await answer.read()
                    return "ok" if answer.status == 200 else str(answer.status)

            tasks = [
                asyncio.ensure_future(lateness.watch()),
                asyncio.ensure_future(every(1 / given.rps, request)),
                asyncio.ensure_future(every(1 / given.rps, lambda: log.note("probe", health()))),
            ]
            await stopping.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    """Be friendly."""
    parser = argparse.ArgumentParser(prog="benchmarks.hostile.friendly", description=__doc__)
    parser.add_argument("--rest-port", type=int, required=True)
    parser.add_argument("--grpc-port", type=int, required=True)
    parser.add_argument("--admin", required=True, help="address of the router's health")
    parser.add_argument("--router", type=int, required=True, help="the router's process id")
    parser.add_argument("--part", type=int, action="append", default=[], help="the id of another process on the way")
    parser.add_argument("--rps", type=float, default=20.0)
    parser.add_argument("--out", type=argparse.FileType("w", encoding="ascii"), required=True)
    asyncio.run(befriend(parser.parse_args()))


if __name__ == "__main__":
    main()
