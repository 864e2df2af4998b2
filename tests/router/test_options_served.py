"""Request options over REST and gRPC: granted, refused, and reported row by row."""

from typing import Any

import numpy as np
import pytest

from tests.builders import a_stage, a_variant
from tests.router.fakes import FakeReplica, a_pipeline, a_rig
from tests.router.test_looking_again import OUTPUTS, POINTS, quick_first
from trimtab_protocol import InferRequest, Tensor
from trimtab_router.scheduling.policies import POLICIES
from trimtab_router.scheduling.policies.interface import Policy

PLAN: dict[str, Any] = {
    "serviceSeconds": {1: 0.02, 8: 0.04},
    "accuracyByTask": {"odd": 0.6},
    "fallbacks": [{"name": "quick", "accuracy": 0.7, "serviceSeconds": {1: 0.01, 8: 0.02}}],
}


class Certain(FakeReplica):
    """A model that is sure of rows above 0.5; at its better point it says 2, else 1."""

    def __init__(self, *, once=False):
        super().__init__(model=self.compute)
        self.once = once
        """Whether it answers one batch and holds back the next."""

    def compute(self, inputs):
        x = inputs["x"]
        if self.once:
            self.gate.clear()
        said = 2.0 if self.seen[-1].parameters["operating_point"] == "default" else 1.0
        return {"y": np.full_like(x, said), "sure": x[:, 0].astype(np.float32)}


def a_wishing(values=(0.9,), **parameters):
    x = np.repeat(np.array(values, np.float32)[:, None], 4, axis=1)
    return InferRequest("sample", (Tensor.of("x", x),), parameters=parameters)


def a_certain_pipeline(points=POINTS, **changes):
    stage = a_stage("stage-0", outputs=OUTPUTS, confidence="sure", variants=[a_variant(operatingPoints=points)])
    return a_pipeline([stage], **changes)


@pytest.fixture
def looking(monkeypatch):
    monkeypatch.setitem(POLICIES, "EarliestDeadlineFirst", Policy(quick_first, uses_fallbacks=True))


async def test_rows_served_differently_are_listed(looking):
    async with a_rig(a_certain_pipeline(), {"stage-0": [Certain()]}, **PLAN) as rig:
        _, answer, _ = await rig.rest(a_wishing([0.9, 0.1, 0.2, 0.8]))

        assert answer.outputs[0].array[:, 0].tolist() == [1.0, 2.0, 2.0, 1.0]
        reply = answer.parameters
        assert reply["trimtab.stage-0.operating_points"] == "quick,default,default,quick"
        assert reply["trimtab.stage-0.confidences"] == "0.9,0.1,0.2,0.8"
        assert reply["trimtab.expected_accuracy"] == pytest.approx(0.8)
        assert "trimtab.escalation_pending" not in reply


async def test_missed_escalation_is_reported(looking):
    replica = Certain(once=True)
    async with a_rig(a_certain_pipeline(), {"stage-0": [replica]}, **PLAN) as rig:
        status, answer, _ = await rig.rest(a_wishing([0.9, 0.1, 0.2], timeout=3_000_000))

        assert status == 200
        assert answer.outputs[0].array[:, 0].tolist() == [1.0, 1.0, 1.0]
        assert answer.parameters["trimtab.escalation_pending"] is True
        assert answer.parameters["trimtab.stage-0.escalation_pending"] == "false,true,true"
        assert rig.value("trimtab_unescalated_responses_total") == 1


EVIDENCE = {"source": "Measured", "samples": 1000, "meanConfidence": 0.9}


async def test_drifted_point_is_reported_in_state_and_metrics():
    odd = {"odd": EVIDENCE | {"value": 0.6}}
    points = [point | {"accuracyEvidence": EVIDENCE, "accuracyByTask": odd} for point in POINTS]
    async with a_rig(a_certain_pipeline(points=points), {"stage-0": [Certain()]}, **PLAN) as rig:
        assert rig.value("trimtab_drifted_points", stage="stage-0") == 0
        for _ in range(30):
            await rig.rest(a_wishing([0.2] * 4, **{"trimtab.task": "odd"}))

        state = (await rig.get("/trimtab/v1/state"))[1]["stages"]["stage-0"]
        (point,) = state["drifted_accuracies"]
        assert state["drifted_accuracies"] == {point: pytest.approx(0.2, abs=0.1)}
        assert state["drifted_by_task"] == {point: {"odd": pytest.approx(0.0, abs=0.1)}}
        assert rig.value("trimtab_drifted_points", stage="stage-0") == 1


async def test_grpc_parameters_have_portable_types():
    async with a_rig(a_certain_pipeline(), {"stage-0": [Certain()]}, **PLAN) as rig:
        answer = await rig.grpc(a_wishing())

        assert {type(value) for value in answer.parameters.values()} <= {bool, int, str}
        assert float(str(answer.parameters["trimtab.expected_accuracy"])) == 0.9
        assert float(str(answer.parameters["trimtab.stage-0.service_seconds"])) > 0
