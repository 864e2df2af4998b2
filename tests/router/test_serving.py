"""Requests through the whole router over real HTTP and gRPC, with fake model servers behind it."""

import asyncio

import numpy as np
import pytest

from tests.router.fakes import FakeReplica, a_pipeline, a_request, a_rig


async def test_both_front_doors_serve_two_stages():
    async with a_rig(a_pipeline(2), {"stage-0": [FakeReplica()], "stage-1": [FakeReplica()]}) as rig:
        status, answer, _ = await rig.rest(a_request(rows=3, value=5.0, id="7"))
        np.testing.assert_array_equal(answer.outputs[0].array, np.full((3, 4), 7.0))
        assert (status, answer.id, answer.model_name, answer.outputs[0].name) == (200, "7", "sample", "y")
        assert answer.parameters["trimtab.stage-1.variant"] == "small"
        assert answer.parameters["trimtab.stage-0.batch_size"] == 3
        assert answer.parameters["trimtab.plan_generation"] == 1
        assert answer.parameters["trimtab.expected_accuracy"] == pytest.approx(0.81)

        answer = await rig.grpc(a_request(rows=2, value=1.0, id="8"))
        np.testing.assert_array_equal(answer.outputs[0].array, np.full((2, 4), 3.0))
        assert answer.id == "8"
        assert 0 <= float(answer.parameters["trimtab.stage-0.queue_seconds"]) < 1

        assert await rig.outcomes() == {"ok": 2}


async def test_rows_of_concurrent_requests_are_batched_and_split():
    replica = FakeReplica()
    async with a_rig(a_pipeline(1), {"stage-0": [replica]}, batchSize=8) as rig:
        replica.gate.clear()
        calls = [asyncio.ensure_future(rig.grpc(a_request(rows=1 + n % 3, value=float(n)))) for n in range(20)]
        await rig.until(lambda: rig.router.state().stages["stage-0"].queue_rows >= 30)
        replica.gate.set()
        answers = await asyncio.gather(*calls)

        for n, answer in enumerate(answers):
            np.testing.assert_array_equal(answer.outputs[0].array, np.full((1 + n % 3, 4), n + 1.0))
        assert replica.most_running == 1
        assert max(batch.rows for batch in replica.seen) == 8
        assert sum(batch.rows for batch in replica.seen) == 39
