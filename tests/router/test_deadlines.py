"""Deadlines, drop policies, full queues, callers who leave, and no replica at all."""

import asyncio
import re
import time

import grpc
import pytest

from tests.builders import a_pipeline
from tests.router.fakes import FakeReplica, a_request, a_rig
from trimtab_router.router import Limits

SECOND = 1_000_000


async def blocked(rig, replica):
    """Keep the only replica busy until its gate opens."""
    replica.gate.clear()
    first = asyncio.ensure_future(rig.rest(a_request(parameters={"timeout": 60 * SECOND})))
    await replica.arrived.wait()
    return first


def queued(rig, rows, stage="stage-0"):
    return lambda: rig.router.state()["stages"][stage]["queue_rows"] == rows


def seconds_in(begins: str, message: object) -> float:
    """Read the seconds that stand at the # of a message that begins so."""
    found = re.match(begins.replace("#", r"(-?\d+\.\d{3}) s\b"), str(message))
    assert found is not None, message
    return float(found[1])


async def test_predicted_drops_alone_while_the_replica_is_still_busy():
    replica = FakeReplica()
    async with a_rig(a_pipeline(1), {"stage-0": [replica]}, serviceSeconds={1: 0.1, 8: 0.1}) as rig:
        first = await blocked(rig, replica)
        patient = asyncio.ensure_future(rig.rest(a_request(value=1.0, parameters={"timeout": 30 * SECOND})))
        begun = time.monotonic()
        status, message, headers = await rig.rest(a_request(parameters={"timeout": 400_000}))

        assert status == 504
        assert message.startswith("dropped at stage stage-0: ")
        assert "0.100 s in this stage" in message
        assert (headers["x-trimtab-reason"], headers["x-trimtab-stage"]) == ("Predicted", "stage-0")
        assert 0.25 < time.monotonic() - begun < 0.45
        replica.gate.set()
        assert [(await call)[0] for call in (first, patient)] == [200, 200]
        assert await rig.outcomes() == {"ok": 2, "dropped": 1}
        assert await rig.metric("trimtab_drops_total", stage="stage-0", reason="Predicted") == 1


async def test_past_drops_once_the_deadline_is_past():
    replica = FakeReplica()
    pipeline = a_pipeline(1, dropPolicy="Past")
    async with a_rig(pipeline, {"stage-0": [replica]}, serviceSeconds={1: 0.1}) as rig:
        first = await blocked(rig, replica)
        begun = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.grpc(a_request(parameters={"timeout": 300_000}))

        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - begun >= 0.3
        queued_seconds = seconds_in(
            r"dropped at stage stage-0: its deadline passed after # in the queue", caught.value.details()
        )
        assert 0.25 < queued_seconds < 0.4  # a little less than 0.3: reading the request counts for its deadline
        replica.gate.set()
        assert (await first)[0] == 200


async def test_never_serves_late_and_says_so():
    replica = FakeReplica()
    async with a_rig(a_pipeline(1, dropPolicy="Never"), {"stage-0": [replica]}, serviceSeconds={1: 0.1}) as rig:
        first = await blocked(rig, replica)
        late = asyncio.ensure_future(rig.rest(a_request(parameters={"timeout": 1})))
        await rig.until(queued(rig, 1))
        replica.gate.set()

        assert [(await call)[0] for call in (first, late)] == [200, 200]
        assert await rig.outcomes() == {"ok": 1, "late": 1}


async def test_the_later_stages_time_counts_at_the_first():
    pipeline = a_pipeline(2)
    stages = {"stage-0": [FakeReplica()], "stage-1": [FakeReplica()]}
    async with a_rig(pipeline, stages, serviceSeconds={1: 0.15}) as rig:
        status, message, _ = await rig.rest(a_request(parameters={"timeout": 250_000}))

        assert status == 504
        assert 0.2 <= seconds_in("dropped at stage stage-0: # are left to its deadline", message) <= 0.25
        assert "0.150 s after it" in message
        assert not stages["stage-0"][0].seen


async def test_the_grpc_deadline_counts_and_the_sooner_of_two():
    replica = FakeReplica()
    async with a_rig(a_pipeline(1), {"stage-0": [replica]}, serviceSeconds={1: 0.2}) as rig:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.grpc(a_request(parameters={"timeout": 100_000}), timeout=20.0)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "dropped at stage stage-0" in str(caught.value.details())

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.grpc(a_request(parameters={"timeout": 20 * SECOND}), timeout=0.1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

        assert (await rig.rest(a_request(parameters={"timeout": 0})))[0] == 200


async def test_the_most_urgent_goes_first():
    replica = FakeReplica()
    async with a_rig(a_pipeline(1), {"stage-0": [replica]}, batchSize=1) as rig:
        first = await blocked(rig, replica)
        done: list[int] = []

        async def call(seconds: int) -> None:
            status, *_ = await rig.rest(a_request(parameters={"timeout": seconds * SECOND}))
            assert status == 200
            done.append(seconds)

        calls = []
        for number, seconds in enumerate((40, 20, 30), 1):
            calls.append(asyncio.ensure_future(call(seconds)))
            await rig.until(queued(rig, number))
        replica.gate.set()
        await asyncio.gather(first, *calls)

        assert done == [20, 30, 40]


async def test_a_full_queue_refuses_and_keeps_what_it_has():
    replica = FakeReplica()
    async with a_rig(a_pipeline(1, queue={"maxRows": 4}), {"stage-0": [replica]}) as rig:
        first = await blocked(rig, replica)
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


async def test_the_bytes_in_flight_are_bounded():
    replica = FakeReplica()
    async with a_rig(a_pipeline(1), {"stage-0": [replica]}, limits=Limits(max_bytes_in_flight=2000)) as rig:
        first = await blocked(rig, replica)
        large = a_request(rows=115, parameters={"timeout": 30 * SECOND})

        status, message, headers = await rig.rest(large)
        assert (status, headers["x-trimtab-reason"]) == (429, "BytesInFlight")
        assert "bytes are in flight" in message

        replica.gate.set()
        await first
        assert await rig.metric("trimtab_bytes_in_flight") == 0
        assert (await rig.rest(large))[0] == 200


async def test_callers_who_leave_free_their_rows():
    replica = FakeReplica()
    async with a_rig(a_pipeline(1), {"stage-0": [replica]}) as rig:
        first = await blocked(rig, replica)
        for call in (rig.rest, rig.grpc):
            leaving = asyncio.ensure_future(call(a_request(rows=5, parameters={"timeout": 60 * SECOND})))
            await rig.until(queued(rig, 5))
            leaving.cancel()
            await rig.until(queued(rig, 0))
        replica.gate.set()
        await first

        assert sum(batch.rows for batch in replica.seen) == 1
        assert await rig.outcomes() == {"ok": 1, "dropped": 2}
        assert await rig.metric("trimtab_drops_total", reason="Cancelled") == 2
        assert await rig.metric("trimtab_bytes_in_flight") == 0


async def test_without_a_replica_rows_are_held_and_served_when_one_comes():
    replica = FakeReplica()
    async with a_rig(a_pipeline(1), {"stage-0": [replica]}) as rig:
        await replica.kill()
        await rig.until(lambda: not rig.router.ready)
        held = asyncio.ensure_future(rig.rest(a_request(parameters={"timeout": 30 * SECOND})))
        await rig.until(queued(rig, 1))
        await replica.start()

        assert (await held)[0] == 200


async def test_without_a_replica_for_too_long_the_answer_is_unavailable():
    async with a_rig(a_pipeline(1), {}, ready=False, limits=Limits(grace_seconds=0.2)) as rig:
        begun = time.monotonic()
        status, message, headers = await rig.rest(a_request(parameters={"timeout": 30 * SECOND}))

        assert (status, headers["Retry-After"], headers["x-trimtab-reason"]) == (503, "1", "NoReplica")
        assert message.startswith("stage stage-0: no replica became ready while the request waited 0.2")
        assert time.monotonic() - begun >= 0.2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.grpc(a_request(parameters={"timeout": 100_000}))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await rig.outcomes() == {"refused": 2}


async def test_a_wrong_profile_does_not_drop_for_ever():
    replica = FakeReplica()
    async with a_rig(a_pipeline(1), {"stage-0": [replica]}, serviceSeconds={1: 5.0}) as rig:
        statuses = [(await rig.rest(a_request()))[0] for _ in range(100)]

        assert statuses[0] == 504
        assert statuses[-1] == 200
