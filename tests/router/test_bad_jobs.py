"""Multimodal jobs that cannot be served: their codes and messages, and no effect on other jobs."""

import asyncio

import grpc
import numpy as np
import pytest

from tests.router.fakes import a_rig
from tests.router.senses import PLAN, Sensing, a_job, a_sensing_pipeline
from trimtab_protocol import InferRequest, Tensor
from trimtab_router.limits import Limits

POLICIES = ("ModalityMix", "SlackFit", "EarliestDeadlineFirst")
FLOOR, PROBABILITY = "trimtab.accuracy_floor", "trimtab.accuracy_probability"
PATIENT = Limits(hang_seconds=60.0)
"""How long a test holds a replica back must not decide what becomes of its batch."""
BAD_JOBS = {
    "a floor above all": (a_job(**{FLOOR: 0.95}), "AccuracyFloor", "the best possible is 0.9000"),
    "a floor above what it has": (
        a_job(names=("image",), **{FLOOR: 0.85}),
        "AccuracyFloor",
        "the best possible is 0.8000 from the inputs given (image)",
    ),
    "a sure floor above what it has": (
        a_job(64, ("sound",), **{FLOOR: 0.59, PROBABILITY: 0.95}),
        "AccuracyFloor",
        "the best possible is 0.6000 from the inputs given (sound)",
    ),
    "senses of different items": (
        InferRequest("sample", (*a_job(2, ("image",)).inputs, *a_job(3, ("sound",)).inputs)),
        "InvalidArgument",
        "the inputs must have the same number of rows, but image has 2, sound has 3",
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
async def test_bad_jobs_are_refused_over_both_protocols(policy):
    replica = Sensing()
    async with a_rig(
        a_sensing_pipeline(schedulingPolicy=policy), {"stage-0": [replica]}, limits=PATIENT, **PLAN
    ) as rig:
        await rig.channel()
        replica.gate.clear()
        others = [asyncio.ensure_future(rig.rest(a_job(3, **{FLOOR: 0.7}))) for _ in range(4)]
        await replica.arrived.wait()
        for kind, (job, reason, message) in BAD_JOBS.items():
            status, body, headers = await rig.rest(job)
            reply = (kind, status, headers.get("x-trimtab-reason"), message in str(body))
            assert reply == (kind, 400, reason, True), body
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rig.grpc(job)
            assert (kind, caught.value.code()) == (kind, grpc.StatusCode.INVALID_ARGUMENT)
            assert message in str(caught.value.details())
        replica.gate.set()

        assert [status for status, *_ in await asyncio.gather(*others)] == [200] * 4
        assert await rig.outcomes() == {"ok": 4, "refused": 2 * len(BAD_JOBS)}


async def test_only_the_job_with_a_corrupt_item_is_refused():
    replica = Sensing()
    corrupt = np.ones((3, 2), np.float32)
    corrupt[1] = 13
    async with a_rig(a_sensing_pipeline(), {"stage-0": [replica]}, limits=PATIENT, **PLAN) as rig:
        await rig.channel()
        replica.gate.clear()
        first = asyncio.ensure_future(rig.rest(a_job()))
        await replica.arrived.wait()
        corrupt_job = InferRequest("sample", (Tensor.of("image", corrupt), *a_job(3, ("sound",)).inputs))
        calls = [asyncio.ensure_future(rig.rest(job)) for job in (a_job(2), corrupt_job, a_job(2))]
        over_grpc = asyncio.ensure_future(rig.grpc(corrupt_job))
        await rig.until(lambda: rig.router.state().stages["stage-0"].queue_rows == 10)
        replica.gate.set()

        answers = await asyncio.gather(first, *calls)
        assert [status for status, *_ in answers] == [200, 200, 400, 200]
        assert answers[2][1] == "stage stage-0: an item is corrupt"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await over_grpc
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("policy", POLICIES)
async def test_job_without_a_modality_gets_its_best_accuracy(policy):
    replica = Sensing()
    async with a_rig(a_sensing_pipeline(schedulingPolicy=policy), {"stage-0": [replica]}, **PLAN) as rig:
        for name, accuracy in (("image", 0.8), ("sound", 0.6)):
            status, answer, _ = await rig.rest(a_job(2, (name,)))
            assert (status, answer.parameters["trimtab.expected_accuracy"]) == (200, accuracy)
            assert replica.inputs[-1] == ("all" if policy == "EarliestDeadlineFirst" else name, [name])
        _, answer, _ = await rig.rest(a_job(2, **{FLOOR: 0.85}))
        assert answer.parameters["trimtab.expected_accuracy"] == 0.9
        assert replica.inputs[-1] == ("all", ["image", "sound"])


async def test_batch_omits_inputs_that_its_point_does_not_read():
    replica = Sensing()
    async with a_rig(a_sensing_pipeline(), {"stage-0": [replica]}, operatingPoint="image", accuracy=0.8) as rig:
        status, answer, _ = await rig.rest(a_job())

    assert (status, answer.parameters["trimtab.expected_accuracy"]) == (200, 0.8)
    assert replica.inputs == [("image", ["image"])]
