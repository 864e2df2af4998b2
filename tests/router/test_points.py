"""Operating points in the router: fallbacks, rows added to a batch, and the points reported to the client."""

import asyncio
from typing import Any

import numpy as np

from tests.builders import a_stage, a_variant
from tests.router.fakes import FakeReplica, a_pipeline, a_rig
from trimtab_protocol import InferRequest, Tensor

SECOND = 1_000_000
POINTS = [{"name": "full", "accuracy": 0.9}, {"name": "half", "accuracy": 0.8, "modalities": ["x"]}]
PLAN: dict[str, Any] = {
    "operatingPoint": "full",
    "serviceSeconds": {1: 10.0, 8: 20.0},
    "fallbacks": [{"name": "half", "accuracy": 0.8, "serviceSeconds": {1: 1.0, 8: 2.0}}],
}


def a_pipeline_of_two_points(**changes):
    inputs = [{"name": "x", "from": "request.inputs.x"}, {"name": "z", "from": "request.inputs.z", "optional": True}]
    stage = a_stage("stage-0", inputs=inputs, variants=[a_variant(operatingPoints=POINTS)])
    declared = [
        {"name": "x", "datatype": "FP32", "shape": [4]},
        {"name": "z", "datatype": "FP32", "shape": [-1], "optional": True},
    ]
    return a_pipeline([stage], inputs=declared, **changes)


def a_request_for(seconds, width=None):
    tensors = [Tensor.of("x", np.ones((1, 4), np.float32))]
    if width is not None:
        tensors.append(Tensor.of("z", np.ones((1, width), np.float32)))
    return InferRequest("sample", tuple(tensors), parameters={"timeout": seconds * SECOND})


class Reading(FakeReplica):
    """Remembers which inputs came along."""

    def __init__(self):
        super().__init__(model=self.compute)
        self.inputs = []

    def compute(self, inputs):
        self.inputs.append((sorted(inputs), len(inputs["x"])))
        return {"y": inputs["x"]}


async def test_request_reachable_only_by_the_faster_point():
    replica = Reading()
    async with a_rig(a_pipeline_of_two_points(schedulingPolicy="SlackFit"), {"stage-0": [replica]}, **PLAN) as rig:
        _, answer, _ = await rig.rest(a_request_for(5))

        assert replica.seen[0].parameters["operating_point"] == "half"
        assert answer.parameters["trimtab.stage-0.operating_point"] == "half"
        assert answer.parameters["trimtab.expected_accuracy"] == 0.8


async def test_with_slack_the_better_point_runs_and_reads_all():
    replica = Reading()
    async with a_rig(a_pipeline_of_two_points(schedulingPolicy="SlackFit"), {"stage-0": [replica]}, **PLAN) as rig:
        _, answer, _ = await rig.rest(a_request_for(50, width=3))

        assert answer.parameters["trimtab.stage-0.operating_point"] == "full"
        assert replica.inputs == [(["x", "z"], 1)]


async def test_batch_omits_inputs_in_which_its_rows_differ():
    replica = Reading()
    async with a_rig(a_pipeline_of_two_points(schedulingPolicy="SlackFit"), {"stage-0": [replica]}, **PLAN) as rig:
        replica.gate.clear()
        first = asyncio.ensure_future(rig.rest(a_request_for(59)))
        await replica.arrived.wait()
        calls = [asyncio.ensure_future(rig.rest(a_request_for(9, width))) for width in (None, 2, 5)]
        await rig.until(lambda: rig.router.state().stages["stage-0"].queue_rows == 3)
        replica.gate.set()
        answers = [await call for call in (first, *calls)]

        assert [status for status, *_ in answers] == [200] * 4
        assert replica.inputs[1:] == [(["x"], 3)]
