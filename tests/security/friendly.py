"""Friendly clients in a process of their own: REST and gRPC in turn, 20 requests a second, and 20 health checks.

With the port of a replica they send chats with an image instead, and check the health of the replica.

It writes one line of JSON for each request and each check until SIGTERM. A client gets only the response to its own
request, whose numbers no other client sends.
"""

import argparse
import asyncio
import itertools
import json
import math
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TextIO

import aiohttp
import numpy as np

from tests.security.attacks import Ground, a_small_png, chat
from trimtab_loadtester.clients import Client, RestClient
from trimtab_loadtester.grpc_client import GrpcClient
from trimtab_pipelines.router_state import READY_PATH
from trimtab_protocol import Tensor

RATE_RPS = 20.0
PATIENCE_SECONDS = 10.0
WIDTH = 4
MAX_NUMBER = 2**23
"""Below it, FP32 represents all integers."""


def running_seconds(pid: int) -> float:
    """Processor time of the first thread of a process, which runs its loop."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9
    except OSError:
        return math.inf


async def ask(client: Client, number: int) -> str:
    """Send a request; returns `ok` for the response to it."""
    request_id, x = f"friend-{number}", np.full((1, WIDTH), number, np.float32)
    parameters = {"binary_data_output": bool(number % 4), "timeout": int(PATIENCE_SECONDS * 1e6)}
    response = await client.send(client.encode((Tensor.of("x", x),), (), parameters, request_id), request_id)
    if response.message is None:
        return f"{response.code} {response.detail}"[:100]
    y = response.message.outputs[0].array
    own = y.shape == (1, WIDTH) and bool((y == number + 2).all()) and response.message.id == request_id
    return "ok" if own and response.headers.get("x-request-id", request_id) == request_id else "wrong"


async def ask_chat(session: aiohttp.ClientSession, url: str, body: bytes) -> str:
    async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
        answer = await response.json()
    if response.status != 200:
        return f"{response.status} {answer}"[:100]
    return "ok" if answer["usage"]["prompt_tokens_details"]["image_tokens"] else "wrong"


async def record(log: TextIO, router: int, kind: str, asking: Awaitable[str]) -> None:
    began, ran = time.monotonic(), running_seconds(router)
    try:
        code = await asyncio.wait_for(asking, PATIENCE_SECONDS)
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        code = f"{type(error).__name__} {error}"[:100]
    seconds, busy_seconds = time.monotonic() - began, running_seconds(router) - ran
    line = {"kind": kind, "at": began, "seconds": seconds, "busy_seconds": busy_seconds, "code": code}
    log.write(json.dumps(line) + "\n")
    log.flush()


async def at_rate(act: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Act 20 times a second, whether earlier acts have ended or not."""
    due = time.monotonic()
    async with asyncio.TaskGroup() as acts:
        while True:
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            acts.create_task(act())
            due = max(due + 1 / RATE_RPS, time.monotonic() - 1 / RATE_RPS)


async def run(given: argparse.Namespace) -> None:
    stop, numbers = asyncio.Event(), itertools.cycle(range(1, MAX_NUMBER))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with (
        RestClient(f"127.0.0.1:{given.rest_port}", given.model) as rest,
        GrpcClient(f"127.0.0.1:{given.grpc_port}", given.model, channels=1) as grpc,
        aiohttp.ClientSession() as session,
    ):
        with given.log.open("w", encoding="ascii") as log:

            async def request() -> None:
                number = next(numbers)
                kind, client = ("rest", rest) if number % 2 else ("grpc", grpc)
                await record(log, given.router, kind, ask(client, number))

            async def health(port: int, path: str) -> str:
                async with session.get(f"http://127.0.0.1:{port}{path}") as response:
                    await response.read()
                    return "ok" if response.status == 200 else str(response.status)

            async def request_chat() -> None:
                url = f"http://127.0.0.1:{given.rest_port}/v1/chat/completions"
                await record(log, given.router, "chat", ask_chat(session, url, body))

            body = chat(Ground(given.model), "see", [a_small_png()], max_tokens=2)
            acts = [request, lambda: record(log, given.router, "health", health(given.admin_port, READY_PATH))]
            if given.replica_port:
                live = "/v2/health/live"
                acts = [request_chat, lambda: record(log, given.replica, "replica", health(given.replica_port, live))]
            tasks = [asyncio.ensure_future(at_rate(act)) for act in acts]
            await stop.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.security.friendly")
    for option in ("--rest-port", "--grpc-port", "--admin-port", "--router"):
        parser.add_argument(option, type=int, required=True)
    parser.add_argument("--replica-port", type=int)
    parser.add_argument("--replica", type=int)
    parser.add_argument("--model", required=True)
    parser.add_argument("--log", type=Path, required=True)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
