"""How many large requests are at the router at once: what it can answer and the door can hold; nobody waits unseen."""

import asyncio
import io
from collections import Counter

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from tests.router.envoy.callers import Reply, post
from tests.router.envoy.stand_in import a_stand_in
from tests.router.envoy.test_limits_of_callers import HEAD
from tests.router.fakes import FakeReplica, Rig, a_pipeline, a_rig, until
from trimtab.local.envoy_process import make_sockets
from trimtab_protocol import InferRequest, RequestedOutput, Tensor, rest
from trimtab_router.envoy.bootstrap import LARGE_HELD_BYTES, LEAST_LARGE_UNDER_WAY, large_bounds
from trimtab_router.envoy.memory_limits import MEBIBYTE
from trimtab_router.envoy.route_discovery import MOST_HELD_BYTES

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
    assert len(body) > MOST_HELD_BYTES
    return await post(rig, (rest.HEADER_LENGTH, str(length)), body=io.BytesIO(body))


async def told(rig: Rig, most_under_way: int) -> None:
    """Let the door be told this bound, and no other any more."""
    await rig.door()
    assert rig.doors.envoy is not None
    assert rig.doors._steering is not None
    rig.doors._steering.cancel()
    await rig.doors.envoy.bound(most_under_way)


async def test_as_many_large_requests_are_under_way_as_the_router_can_answer():
    replica = FakeReplica()
    async with a_rig(WIDE, {"stage-0": [replica]}) as rig:
        await told(rig, 64)
        replica.gate.clear()
        asking = [asyncio.create_task(ask(rig)) for _ in range(48)]
        await rig.until(lambda: rig.router.budget.waiting == 48)
        replica.gate.set()

        assert [(await one).status for one in asking] == [200] * 48


async def test_more_large_requests_than_may_be_under_way_are_refused_at_once():
    """One that waits at the door for another's end is in nobody's count, and its deadline in nobody's hands."""
    replica = FakeReplica()
    async with a_rig(WIDE, {"stage-0": [replica]}) as rig:
        await told(rig, 1)
        replica.gate.clear()
        asking = [asyncio.create_task(ask(rig)) for _ in range(LEAST_LARGE_UNDER_WAY)]
        await rig.until(lambda: rig.router.budget.waiting == LEAST_LARGE_UNDER_WAY)
        async with asyncio.timeout(20):
            refused = [await ask(rig) for _ in range(3)]
        replica.gate.set()

        assert {(one.status, one.headers["x-trimtab-reason"]) for one in refused} == {(429, "Overload")}
        assert Counter([(await one).status for one in asking]) == {200: LEAST_LARGE_UNDER_WAY}


@pytest.mark.parametrize(
    ("window", "heap_mebibytes", "most"), [(1, 180, 32), (64, 180, 64), (4096, 180, 180), (4096, 900, 900), (64, 8, 32)]
)
def test_they_are_as_many_as_are_answered_in_time_and_fit_into_half_of_the_doors_memory(window, heap_mebibytes, most):
    bounds = large_bounds(window, heap_mebibytes * MEBIBYTE)

    assert bounds["max_requests"] == most
    assert bounds["max_connections"] > most, "with one for each, who is too many would wait for another's end"


async def test_what_one_holds_at_the_door_is_bounded_while_the_router_reads_nothing():
    reads, came, sockets = asyncio.Event(), [], make_sockets()

    async def answer(request: web.BaseRequest) -> web.Response:
        came.append(request)
        await reads.wait()
        return web.Response(text="{}")

    async with (
        a_stand_in(answer, sockets=sockets) as ports,
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(sockets.envoy))) as envoy,
    ):

        async def allocated_bytes() -> int:
            async with envoy.get("http://envoy/memory") as told_of:
                return int((await told_of.json())["allocated"])

        seen = [await allocated_bytes()]
        callers = [await asyncio.open_connection("127.0.0.1", ports.rest_port) for _ in range(LEAST_LARGE_UNDER_WAY)]
        for _, writer in callers:
            writer.write(HEAD + b"content-length: 8000000\r\n\r\n" + bytes(7_000_000))
        await until(lambda: len(came) == LEAST_LARGE_UNDER_WAY)
        async with asyncio.timeout(60):
            while len(seen) < 10 or max(seen[-5:]) - min(seen[-5:]) > MEBIBYTE / 4:  # until it takes no more
                seen.append(await allocated_bytes())
                await asyncio.sleep(0.1)  # nobody tells when that is
        for _, writer in callers:
            writer.transport.abort()
        reads.set()

        most_held = LARGE_HELD_BYTES + 2 * READ_BYTES
        assert seen[-1] - seen[0] < LEAST_LARGE_UNDER_WAY * most_held
