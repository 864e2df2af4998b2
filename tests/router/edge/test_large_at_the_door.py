"""How many large requests are at the router at once: as many as it can answer, and nobody waits unseen before it."""

import asyncio
import io
from collections import Counter

import numpy as np

from tests.router.edge.callers import Reply, post
from tests.router.fakes import FakeReplica, Rig, a_pipeline, a_rig
from trimtab_protocol import InferRequest, RequestedOutput, Tensor, rest
from trimtab_router.edge.bootstrap import LEAST_LARGE_UNDER_WAY
from trimtab_router.edge.routes import MOST_HELD_BYTES

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
