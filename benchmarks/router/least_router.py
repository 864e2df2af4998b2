"""The least router for two stages of y = x + 1, on the router's HTTP server and client: parse, queue, batches, join."""

import asyncio
import heapq
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import orjson
from aiohttp import web

from trimtab_pipelines.processes.child_process import RouterPorts, print_ready_line
from trimtab_protocol import event_loop
from trimtab_protocol.http_client import HttpConnection, request_head

BATCH_SIZE, TIMEOUT_SECONDS, MAX_BODY_BYTES = 8, 10.0, 2**26
LENGTH, BINARY = "Inference-Header-Content-Length", {"Content-Type": "application/octet-stream"}
OnEnd = Callable[[Any], None]


class Stage:
    """A queue by deadline, and one replica that computes one batch at a time."""

    def __init__(self, address: str) -> None:
        self.host, _, port = address.partition(":")
        self.port, self.order, self.is_busy = int(port), count(), False
        self.queue: list[tuple[float, int, Any, OnEnd]] = []
        self.connection: HttpConnection | None = None

    def push(self, deadline: float, rows: Any, on_end: OnEnd) -> None:
        heapq.heappush(self.queue, (deadline, next(self.order), rows, on_end))
        if not self.is_busy:
            self.is_busy = True
            asyncio.get_running_loop().call_soon(self.dispatch)

    def dispatch(self) -> None:
        batch = [heapq.heappop(self.queue) for _ in range(min(BATCH_SIZE, len(self.queue)))]
        self.task = asyncio.ensure_future(self.send(batch))

    async def send(self, batch: list[tuple[float, int, Any, OnEnd]]) -> None:
        shape = [sum([len(rows) for _, _, rows, _ in batch]), batch[0][2].shape[1]]
        size = {"binary_data_size": 4 * shape[0] * shape[1]}
        inputs = [{"name": "x", "shape": shape, "datatype": "FP32", "parameters": size}]
        head = orjson.dumps({"inputs": inputs, "outputs": [{"name": "y", "parameters": {"binary_data": True}}]})
        headers, length = {**BINARY, LENGTH: str(len(head))}, len(head) + size["binary_data_size"]
        request = request_head("POST", "/v2/models/echo/infer", self.host, headers, length)
        if self.connection is None:
            self.connection = await HttpConnection.open(self.host, self.port)
        body = [head, *(rows for _, _, rows, _ in batch)]
        reply = await self.connection.exchange(request, body, max_body_bytes=MAX_BODY_BYTES)
        results = np.frombuffer(reply.body[int(reply.headers[LENGTH.lower()]) :], np.float32).reshape(shape)
        self.is_busy = bool(self.queue)
        if self.queue:
            self.dispatch()
        start = 0
        for _, _, rows, on_end in batch:
            on_end(results[start : start + len(rows)])
            start += len(rows)


async def main() -> None:
    first, second = map(Stage, sys.argv[1:])

    async def infer(request: web.BaseRequest) -> web.Response:
        body, deadline = await request.read(), time.monotonic() + TIMEOUT_SECONDS
        length = int(request.headers[LENGTH])
        head = orjson.loads(body[:length])
        rows = np.frombuffer(body, np.float32, offset=length).reshape(head["inputs"][0]["shape"])
        result = asyncio.get_running_loop().create_future()
        first.push(deadline, rows, lambda y: second.push(deadline, y, result.set_result))
        y = await result
        output = {"name": "y", "datatype": "FP32", "shape": y.shape, "parameters": {"binary_data_size": y.nbytes}}
        head = orjson.dumps({"model_name": "echo", "id": head.get("id", ""), "outputs": [output]})
        return web.Response(body=head + y.tobytes(), headers={**BINARY, LENGTH: str(len(head))})

    runner = web.ServerRunner(web.Server(infer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print_ready_line(RouterPorts(runner.addresses[0][1], 0))
    await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=event_loop.new_event_loop) as loop:
        loop.run(main())
