"""Replicas that die, fail, hang and return: each request is answered once, with its own rows."""

import asyncio
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.router.fakes import PATIENT, FakeReplica, a_pipeline, a_request, a_rig, until
from trimtab_router.limits import Limits
from trimtab_router.scheduling.policies.interface import Policy
from trimtab_router.transport import replica_client
from trimtab_router.transport.http_transport import HttpTransport
from trimtab_router.transport.replica_client import ReplicaClient


def answered(answer, rows, value, stages=1):
    status, response, _ = answer
    assert status == 200, response
    np.testing.assert_array_equal(response.outputs[0].array, np.full((rows, 4), value + stages))


async def test_disconnect_at_dispatch_harms_no_batch_mate(monkeypatch):
    replica = FakeReplica()
    async with a_rig(a_pipeline(1), {"stage-0": [replica]}, batchSize=2) as rig:
        send = HttpTransport.send

        def send_and_cancel_one(self, batch, on_end):
            send(self, batch, on_end)
            if len(batch.row_slices) == 2:
                batch.row_slices[1].request.owner.release()
                batch.row_slices[1].request.close()

        first = await rig.hold(replica, value=1.0)
        monkeypatch.setattr(HttpTransport, "send", send_and_cancel_one)
        stays, leaves = (
            asyncio.ensure_future(rig.rest(a_request(value=value, parameters=PATIENT))) for value in (2.0, 3.0)
        )
        await rig.until(lambda: rig.router.admission.memory.requests == 3)
        replica.gate.set()

        answered(await first, 1, 1)
        answered(await stays, 1, 2)
        leaves.cancel()


async def test_a_replica_that_comes_back_is_used_again(rig, replica):
    for _ in range(2):
        await replica.kill()
        await rig.until(lambda: not rig.router.ready)
        await replica.start()
        await rig.until_ready()
        answered(await rig.rest(a_request(parameters=PATIENT)), 1, 0)


async def test_model_server_error_is_retried_then_reported():
    replica = FakeReplica(faults=[(500, "out of luck")])
    async with a_rig(a_pipeline(1), {"stage-0": [replica]}) as rig:
        answered(await rig.rest(a_request(value=3.0)), 1, 3)

        replica.faults = [(500, "out of luck")] * 3
        status, message, _ = await rig.rest(a_request())
        assert status == 500
        assert message == "stage stage-0: its model server failed; see the router's log"
        answered(await rig.rest(a_request(value=4.0)), 1, 4)
        assert await rig.outcomes() == {"ok": 2, "failed": 1}


async def test_malformed_response_fails_only_its_batch(caplog):
    replica = FakeReplica(model=lambda inputs: {"z": inputs["x"]})
    async with a_rig(a_pipeline(1), {"stage-0": [replica]}) as rig:
        status, message, _ = await rig.rest(a_request())

        assert status == 500
        assert message == "stage stage-0: its model server failed; see the router's log"
        assert "model server replica-0: stage stage-0: the response has no output 'y'; it has: z" in caplog.text


async def test_a_replica_that_hangs_counts_as_lost():
    hanging, other = FakeReplica(name="a"), FakeReplica(name="b")
    limits = Limits(hang_seconds=0.2)
    async with a_rig(a_pipeline(1), {"stage-0": [hanging, other]}, limits=limits, serviceSeconds={1: 0.005}) as rig:
        hanging.gate.clear()
        answers = await asyncio.gather(*(rig.rest(a_request(value=7.0, parameters=PATIENT)) for _ in range(2)))

        for answer in answers:
            answered(answer, 1, 7)
        assert rig.value("trimtab_retries_total", reason="ReplicaLost") >= 1


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=25),
    st.integers(1, 8),
    st.lists(st.sampled_from([None, None, 400, 500, 503]), max_size=12),
    st.integers(0, 2**16),
)
def test_each_answer_is_its_own_whatever_happens(requests, batch_size, faults, seed):
    asyncio.run(_each_answer_is_its_own(requests, batch_size, faults, seed))


async def _each_answer_is_its_own(requests, batch_size, faults, seed):
    chance = random.Random(seed)
    stages = {f"stage-{s}": [FakeReplica(name=f"{s}-{n}") for n in range(2)] for s in range(2)}
    for fault in faults:
        if fault is not None:
            chance.choice(chance.choice(list(stages.values()))).faults.append((fault, "injected"))
    async with a_rig(a_pipeline(2), stages, batchSize=batch_size) as rig:
        calls = [
            asyncio.ensure_future(_typed(rig, over_grpc, a_request(rows=rows, value=float(n), parameters=PATIENT)))
            for n, (rows, over_grpc) in enumerate(requests)
        ]
        await stages["stage-0"][0].arrived.wait()
        await stages["stage-0"][1].kill()
        answers = await asyncio.gather(*calls)

        for n, ((rows, _), answer) in enumerate(zip(requests, answers, strict=True)):
            if isinstance(answer, str):
                assert "injected" in answer or "its model server failed" in answer
            else:
                np.testing.assert_array_equal(answer.outputs[0].array, np.full((rows, 4), n + 2))
        outcomes = await rig.outcomes()
        assert sum(outcomes.values()) == len(requests)
        assert outcomes.get("ok", 0) == sum(not isinstance(answer, str) for answer in answers)


async def _typed(rig, over_grpc, request):
    import grpc  # noqa: PLC0415 - only here

    if over_grpc:
        try:
            return await rig.grpc(request)
        except grpc.aio.AioRpcError as error:
            return error.details()
    return (await rig.rest(request))[1]


@pytest.mark.parametrize("over_grpc", [False, True])
async def test_draining_answers_what_was_accepted_and_refuses_the_rest(rig, replica, over_grpc):
    replica.gate.clear()
    accepted = asyncio.ensure_future(_typed(rig, over_grpc, a_request(parameters=PATIENT)))
    await replica.arrived.wait()
    draining = asyncio.ensure_future(rig.router.drain(10.0))
    await rig.until(lambda: rig.router.admission.draining)

    assert await _typed(rig, over_grpc, a_request()) == "this router is shutting down; try another"
    assert (await rig.get("/v2/health/ready"))[0] == 503
    assert (await rig.get("/readyz"))[0] == 503
    replica.gate.set()
    assert not isinstance(await accepted, str)
    await draining


async def test_lagging_replica_is_ejected_with_its_reason():
    replicas = [FakeReplica(name=f"replica-{n}") for n in range(2)]
    async with a_rig(a_pipeline(), {"stage-0": replicas}) as rig:
        await rig.until_ready()
        for replica in replicas:
            replica.overload = "its event loop lagged"

        def rejections() -> list[str]:
            endpoints = rig.router.state().stages["stage-0"].endpoints.values()
            return sorted(endpoint.rejection for endpoint in endpoints)

        await rig.until(lambda: rejections() == ["", "ejected as an outlier: its event loop lagged"])
        assert rig.router.ready
        for replica in replicas:
            replica.overload = ""
        await rig.until(lambda: not any(replica.overload for replica in rig.router.schedulers["stage-0"].replicas))


async def test_busy_replica_stays_ready_despite_late_probe(monkeypatch):
    monkeypatch.setattr(replica_client, "PROBE_TIMEOUT_SECONDS", 0.05)
    busy = FakeReplica()
    async with a_rig(a_pipeline(1), {"stage-0": [busy]}) as rig:
        answered(await rig.rest(a_request(value=7.0)), 1, 7)
        busy.health.clear()
        before = busy.probes
        while busy.probes < before + 2:
            answered(await rig.rest(a_request(value=7.0, parameters=PATIENT)), 1, 7)
        assert rig.router.state().stages["stage-0"].ready_replicas == 1
        await rig.until(lambda: not rig.router.state().stages["stage-0"].ready_replicas)
        busy.health.set()


async def test_probe_older_than_a_failure_is_ignored():
    fake = await FakeReplica().start()
    changes: list[tuple[bool, int]] = []
    replica = ReplicaClient(fake.endpoint(), lambda: changes.append((bool(replica.slots.ready_variants), fake.probes)))
    await until(lambda: bool(replica.slots.ready_variants))
    fake.health.clear()
    await until(lambda: fake.probes > changes[-1][1])
    asked = fake.probes
    replica.mark_unready()
    fake.health.set()
    await until(lambda: bool(replica.slots.ready_variants))

    assert [ready for ready, _ in changes] == [True, False, True]
    assert changes[-1][1] > asked
    await replica.close()
    await fake.stop()


async def test_failing_policy_falls_back_and_logs_once(caplog):
    def fails(view):
        raise IndexError(view.max_batch_rows)

    async with a_rig(policy=Policy(fails), batchSize=4) as rig:
        for n in range(3):
            answered(await rig.rest(a_request(value=float(n))), 1, n)

        assert rig.value("trimtab_policy_errors_total", stage="stage-0") == 3
    (record,) = [record for record in caplog.records if "its scheduling policy failed" in record.message]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], IndexError)
