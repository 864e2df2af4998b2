"""Multimodal jobs that cannot be served: their codes and messages, and no effect on other jobs."""

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest

from tests.builders import a_stage, a_variant
from tests.router.fakes import FakeReplica, a_pipeline, a_rig, grpc_refusal
from trimtab_protocol import InferRequest, Tensor
from trimtab_router.limits import Limits

ACCURACY = {"all": 0.9, "image": 0.8, "sound": 0.6}
READS = {"image": ["image"], "sound": ["sound"]}
"""Of the points that leave an input out."""
OUTPUTS = [{"name": "y", "datatype": "FP32"}]
PLAN: dict[str, Any] = {
    "operatingPoint": "all",
    "serviceSeconds": {1: 0.02, 8: 0.04},
    "fallbacks": [
        {"name": name, "accuracy": ACCURACY[name], "inputs": reads, "serviceSeconds": {1: 0.01, 8: 0.02}}
        for name, reads in READS.items()
    ],
}
POLICIES = ("ModalityMix", "SlackFit", "EarliestDeadlineFirst")
FLOOR, PROBABILITY = "trimtab.accuracy_floor", "trimtab.accuracy_probability"
PATIENT = Limits(hang_seconds=60.0)
"""How long a test holds a replica back must not decide what becomes of its batch."""


class Sensing(FakeReplica):
    """Remembers at which point it served which inputs; finds fault with a batch that holds 13."""

    def __init__(self):
        super().__init__(model=self.compute, refuse=self.cursed)
        self.inputs: list[tuple[str, list[str]]] = []

    def compute(self, inputs):
        self.inputs.append((str(self.seen[-1].parameters["operating_point"]), sorted(inputs)))
        return {"y": next(iter(inputs.values()))[:, 0]}

    def cursed(self, inputs):
        return (400, "an item is corrupt") if any((array == 13).any() for array in inputs.values()) else None


def a_sensing_pipeline(**changes):
    given = [{"name": name, "from": f"request.inputs.{name}", "optional": True} for name in READS]
    points = [{"name": name, "accuracy": accuracy} for name, accuracy in ACCURACY.items()]
    points = [point | ({"modalities": READS[point["name"]]} if point["name"] in READS else {}) for point in points]
    stage = a_stage("stage-0", inputs=given, outputs=OUTPUTS, variants=[a_variant(operatingPoints=points)])
    declared = [{"name": name, "datatype": "FP32", "shape": [2], "optional": True} for name in READS]
    return a_pipeline([stage], inputs=declared, **{"schedulingPolicy": "ModalityMix"} | changes)


def a_job(rows=1, names=("image", "sound"), value=1.0, **parameters):
    inputs = tuple(Tensor.of(name, np.full((rows, 2), value, np.float32)) for name in names)
    return InferRequest("sample", inputs, parameters=parameters)


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
    pipeline = a_sensing_pipeline(schedulingPolicy=policy)
    async with a_rig(pipeline, {"stage-0": [replica]}, limits=PATIENT, **PLAN) as rig:
        await rig.channel()
        replica.gate.clear()
        others = [asyncio.ensure_future(rig.rest(a_job(3, **{FLOOR: 0.7}))) for _ in range(4)]
        await replica.arrived.wait()
        for kind, (job, reason, message) in BAD_JOBS.items():
            status, body, headers = await rig.rest(job)
            reply = (kind, status, headers.get("x-trimtab-reason"), message in str(body))
            assert reply == (kind, 400, reason, True), body
            code, why = await grpc_refusal(rig.grpc(job))
            assert (kind, code, message in why) == (kind, grpc.StatusCode.INVALID_ARGUMENT, True)
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
        assert (await grpc_refusal(over_grpc))[0] is grpc.StatusCode.INVALID_ARGUMENT


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
