"""Limit of large requests in flight to the router."""

import asyncio
import io
from collections import Counter

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from tests.router.envoy.fake_router import a_fake_router
from tests.router.envoy.http_clients import Reply, post
from tests.router.envoy.test_client_limits import HEAD
from tests.router.fakes import FakeReplica, Rig, a_pipeline, a_rig, until
from trimtab.local.envoy_process import make_sockets
from trimtab_protocol import InferRequest, RequestedOutput, Tensor, rest
from trimtab_router.envoy.bootstrap import LARGE_REQUEST_BYTES, MIN_LARGE_IN_FLIGHT, large_request_limits
from trimtab_router.envoy.route_discovery import MAX_BUFFERED_BYTES
from trimtab_router.limits import MEBIBYTE

READ_BYTES = 128 * 1024
"""What Envoy takes from a socket at a time, full as its buffer may be by then."""
STAGE = {
    "name": "stage-0",
    "inputs": [{"name": "x", "from": "request.inputs.x"}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1]}],
    "variants": [{"name": "small", "family": "echo", "storageUri": "random://?seed=1", "accuracy": 0.9}],
}
WIDE = a_pipeline([STAGE], inputs=[{"name": "x", "datatype": "FP32", "shape": [-1]}])
X = np.zeros((1, 300 * 1024 // 4), np.float32)


async def ask(rig: Rig) -> Reply:
    wanted = (RequestedOutput("y", {"binary_data": True}),)
    buffers, length = rest.encode_request(InferRequest("sample", (Tensor.of("x", X),), requested_outputs=wanted))
    body = b"".join(bytes(buffer) for buffer in buffers)
    assert len(body) > MAX_BUFFERED_BYTES
    return await post(rig, (rest.HEADER_LENGTH, str(length)), body=io.BytesIO(body))


async def set_limit(rig: Rig, most_under_way: int) -> None:
    """Set the limit of requests in flight, and stop the controller."""
    await rig.proxy()
    assert rig.listeners.envoy is not None
    assert rig.listeners.overload_task is not None
    rig.listeners.overload_task.cancel()
    await rig.listeners.envoy.set_limits(most_under_way)


async def test_large_requests_reach_the_concurrency_limit():
    replica = FakeReplica()
    async with a_rig(WIDE, {"stage-0": [replica]}) as rig:
        await set_limit(rig, 64)
        replica.gate.clear()
        asking = [asyncio.create_task(ask(rig)) for _ in range(48)]
        await rig.until(lambda: rig.router.admission.memory.active_requests == 48)
        replica.gate.set()

        assert [(await one).status for one in asking] == [200] * 48


async def test_excess_large_requests_are_refused_at_once():
    """A request that waited in Envoy would be counted nowhere, and miss its deadline."""
    replica = FakeReplica()
    async with a_rig(WIDE, {"stage-0": [replica]}) as rig:
        await set_limit(rig, 1)
        replica.gate.clear()
        asking = [asyncio.create_task(ask(rig)) for _ in range(MIN_LARGE_IN_FLIGHT)]
        await rig.until(lambda: rig.router.admission.memory.active_requests == MIN_LARGE_IN_FLIGHT)
        async with asyncio.timeout(20):
            refused = [await ask(rig) for _ in range(3)]
        replica.gate.set()

        assert {(one.status, one.headers["x-trimtab-reason"]) for one in refused} == {(429, "Overload")}
        assert Counter([(await one).status for one in asking]) == {200: MIN_LARGE_IN_FLIGHT}


@pytest.mark.parametrize(
    ("window", "heap_mebibytes", "most"), [(1, 180, 32), (64, 180, 64), (4096, 180, 180), (4096, 900, 900), (64, 8, 32)]
)
def test_large_request_limit_fits_half_of_envoys_memory(window, heap_mebibytes, most):
    bounds = large_request_limits(window, heap_mebibytes * MEBIBYTE)

    assert bounds["max_requests"] == most
    assert bounds["max_connections"] > most, "with one for each, who is too many would wait for another's end"


async def test_large_request_memory_in_envoy_is_bounded():
    reads, came, sockets = asyncio.Event(), [], make_sockets()

    async def answer(request: web.BaseRequest) -> web.Response:
        came.append(request)
        await reads.wait()
        return web.Response(text="{}")

    async with (
        a_fake_router(answer, sockets=sockets) as ports,
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(sockets.envoy_admin))) as envoy,
    ):

        async def allocated_bytes() -> int:
            async with envoy.get("http://envoy/memory") as response:
                return int((await response.json())["allocated"])

        seen = [await allocated_bytes()]
        callers = [await asyncio.open_connection("127.0.0.1", ports.rest_port) for _ in range(MIN_LARGE_IN_FLIGHT)]
        for _, writer in callers:
            writer.write(HEAD + b"content-length: 8000000\r\n\r\n" + bytes(7_000_000))
        await until(lambda: len(came) == MIN_LARGE_IN_FLIGHT)
        async with asyncio.timeout(60):
            while len(seen) < 10 or max(seen[-5:]) - min(seen[-5:]) > MEBIBYTE / 4:  # until it takes no more
                seen.append(await allocated_bytes())
                await asyncio.sleep(0.1)  # there is no event for that
        for _, writer in callers:
            writer.transport.abort()
        reads.set()

        most_held = LARGE_REQUEST_BYTES + 2 * READ_BYTES
        assert seen[-1] - seen[0] < MIN_LARGE_IN_FLIGHT * most_held
