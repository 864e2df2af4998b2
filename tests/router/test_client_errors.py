"""Client errors and server errors are counted apart, with and without Envoy."""

import asyncio
import time
from contextlib import suppress

import pytest

from tests.router.fakes import FakeReplica, a_call, a_pipeline, a_request, a_rig
from trimtab_pipelines.request_outcome import ErrorCode
from trimtab_router.refusal import Refusal


@pytest.mark.parametrize(
    ("status", "reason", "code", "callers"),
    [
        (400, "Malformed", "INVALID_ARGUMENT", True),
        (429, "ClientRateLimited", "RESOURCE_EXHAUSTED", True),
        (429, "Overload", "RESOURCE_EXHAUSTED", False),
        (502, "RouterUnavailable", "UNAVAILABLE", False),
        (503, "RouterUnavailable", "UNAVAILABLE", False),
    ],
)
async def test_proxy_rejections_are_client_or_server_errors(status, reason, code, callers):
    async with a_rig(a_pipeline(1), {"stage-0": [FakeReplica()]}) as rig:
        rig.router.accounting.count_proxy_rejections({(status, reason): 3})

        assert rig.value("trimtab_refusals_total", code=code, reason=reason) == 3
        assert rig.value("trimtab_client_errors_total") == (3 if callers else 0)
        assert await rig.outcomes() == {"refused": 3}


async def test_disconnect_after_the_slo_is_a_server_error():
    replica = FakeReplica()
    replica.gate.clear()
    async with a_rig(a_pipeline(1, slo={"latency": "60s"}), {"stage-0": [replica]}) as rig:
        request = a_request(parameters={"timeout": 600_000_000})
        waiting = asyncio.create_task(rig.router.infer(a_call(rig.router.pipeline, request, time.monotonic() - 61.0)))
        await replica.arrived.wait()
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting

        assert await rig.outcomes() == {"dropped": 1}
        assert rig.value("trimtab_client_errors_total") == 0


@pytest.mark.parametrize(
    ("parameters", "callers"), [({}, 0), ({"timeout": 200_000}, 0), ({"timeout": 199_999}, 20)], ids=str
)
async def test_drop_at_the_slo_is_a_server_error(parameters, callers):
    now, pipeline = time.monotonic(), a_pipeline(1, slo={"latency": "200ms"})
    async with a_rig(pipeline, {"stage-0": [FakeReplica()]}) as rig:
        for n in range(20):
            with pytest.raises(Refusal) as caught:
                await rig.router.infer(a_call(pipeline, a_request(parameters=parameters), (now - 1.0) / 2**n))
            assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED

        assert rig.value("trimtab_client_errors_total") == callers
        assert await rig.outcomes() == {"dropped": 20}
