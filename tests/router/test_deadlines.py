"""Deadlines, drop policies, full queues, disconnects, and stages without a replica."""

import asyncio
import time

import grpc
import pytest

from tests.router.fakes import PATIENT, FakeReplica, a_pipeline, a_request, a_rig, grpc_refusal, seconds_in
from trimtab_router.admission.concurrency_limit import MIN_REQUESTS
from trimtab_router.limits import Limits

SECOND = 1_000_000


def queued(rig, rows, stage="stage-0"):
    return lambda: rig.router.state().stages[stage].queue_rows == rows


async def test_requests_beyond_the_limit_are_refused():
    replica = FakeReplica()
    async with a_rig(a_pipeline(1), {"stage-0": [replica]}, batchSize=1, serviceSeconds={1: 10.0}) as rig:
        first = await rig.hold(replica)
        most = MIN_REQUESTS  # more than the 12 that one replica answers within twice the SLO
        patient = a_request(parameters={"timeout": 600 * SECOND})
        calls = [asyncio.ensure_future(rig.rest(patient)) for _ in range(most - 1)]
        await rig.until(queued(rig, most - 1))
        await rig.until(lambda: rig.router.admission.concurrency.concurrency_limit.limit == most)

        status, message, headers = await rig.rest(patient)
        assert (status, headers["x-trimtab-reason"], headers["Retry-After"]) == (429, "Overload", "1")
        assert message.startswith("the router is overloaded: 16 requests are in flight")
        view = rig.router.schedulers["stage-0"].view("small", time.monotonic())
        admitted_rps = view.arrivals_rps()
        await rig.until(lambda: view.arrivals_rps() > admitted_rps)  # rejected requests are load too
        replica.gate.set()
        assert [(await call)[0] for call in (first, *calls)] == [200] * most
        assert (await rig.rest(a_request()))[0] == 200
        assert await rig.outcomes() == {"ok": most + 1, "refused": 1}


async def test_the_grpc_deadline_counts_and_the_sooner_of_two():
    replica = FakeReplica()
    async with a_rig(a_pipeline(1), {"stage-0": [replica]}, serviceSeconds={1: 0.2}) as rig:
        code, why = await grpc_refusal(rig.grpc(a_request(parameters={"timeout": 100_000}), timeout=20.0))
        assert (code, "dropped at stage stage-0" in why) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)
        code, _ = await grpc_refusal(rig.grpc(a_request(parameters={"timeout": 20 * SECOND}), timeout=0.1))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED

        assert (await rig.rest(a_request(parameters={"timeout": 0})))[0] == 200


async def test_a_full_queue_refuses_and_keeps_what_it_has():
    replica = FakeReplica()
    async with a_rig(a_pipeline(1, queue={"maxRows": 4}), {"stage-0": [replica]}) as rig:
        first = await rig.hold(replica)
        waiting = asyncio.ensure_future(rig.rest(a_request(rows=3, parameters={"timeout": 30 * SECOND})))
        await rig.until(queued(rig, 3))

        status, message, headers = await rig.rest(a_request(rows=2))
        assert (status, headers["Retry-After"]) == (429, "1")
        assert message == "stage stage-0: its queue holds 3 rows of at most 4; try again later"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.grpc(a_request(rows=2))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "grpc-retry-pushback-ms" in str(caught.value.trailing_metadata())

        replica.gate.set()
        assert [(await call)[0] for call in (first, waiting)] == [200, 200]
        assert await rig.outcomes() == {"ok": 2, "refused": 2}


async def test_disconnect_frees_queued_rows(rig, replica):
    first = await rig.hold(replica)
    for call in (rig.rest, rig.grpc):
        leaving = asyncio.ensure_future(call(a_request(rows=5, parameters=PATIENT)))
        await rig.until(queued(rig, 5))
        leaving.cancel()
        await rig.until(queued(rig, 0))
    replica.gate.set()
    await first

    assert sum(batch.rows for batch in replica.seen) == 1
    assert await rig.outcomes() == {"ok": 1, "dropped": 2}
    assert rig.value("trimtab_drops_total", reason="Cancelled") == 2
    assert rig.value("trimtab_client_errors_total") == 2, "the SLO could still be met"
    assert rig.value("trimtab_bytes_in_flight") == 0


async def test_rows_without_replica_become_unavailable():
    async with a_rig(a_pipeline(1), {}, ready=False, limits=Limits(grace_seconds=0.2)) as rig:
        begun = time.monotonic()
        status, message, headers = await rig.rest(a_request(parameters={"timeout": 30 * SECOND}))

        assert (status, headers["Retry-After"], headers["x-trimtab-reason"]) == (503, "1", "NoReplica")
        waited_seconds = seconds_in("stage stage-0: no replica became ready while the request waited #", message)
        assert 0.2 <= waited_seconds <= time.monotonic() - begun + 0.001
        code, _ = await grpc_refusal(rig.grpc(a_request(parameters={"timeout": 100_000})))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert await rig.outcomes() == {"refused": 2}
