"""Limit of large requests in flight to the router."""

import asyncio
import io
from collections import Counter

import numpy as np
import pytest

from tests.builders import a_stage
from tests.router.envoy.http_clients import Reply, post
from tests.router.fakes import FakeReplica, Rig, a_pipeline, a_rig
from trimtab_protocol import InferRequest, RequestedOutput, Tensor, rest
from trimtab_router.envoy.bootstrap import MIN_LARGE_IN_FLIGHT, large_request_limits
from trimtab_router.envoy.route_discovery import MAX_BUFFERED_BYTES
from trimtab_router.limits import MEBIBYTE

ANY_WIDTH = {"datatype": "FP32", "shape": [-1]}
STAGE = a_stage("stage-0", outputs=[{"name": "y", **ANY_WIDTH}])
WIDE = a_pipeline([STAGE], inputs=[{"name": "x", **ANY_WIDTH}])
X = np.zeros((1, 300 * 1024 // 4), np.float32)


async def ask(rig: Rig) -> Reply:
    wanted = (RequestedOutput("y", {"binary_data": True}),)
    buffers, length = rest.encode_request(InferRequest("sample", (Tensor.of("x", X),), requested_outputs=wanted))
    body = b"".join(bytes(buffer) for buffer in buffers)
    assert len(body) > MAX_BUFFERED_BYTES
    return await post(rig, (rest.HEADER_LENGTH, str(length)), body=io.BytesIO(body))


async def set_limit(rig: Rig, most_under_way: int) -> None:
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
