"""Rows below the confidence threshold escalate, keep a provisional response meanwhile, and are reported row by row."""

import asyncio
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from tests import builders
from tests.builders import a_plan, a_stage, a_variant
from tests.router.fakes import FakeReplica, a_pipeline, a_rig
from tests.router.test_stage_scheduler import READY, SchedulerScenario
from trimtab_pipelines.escalation import TaskEscalation
from trimtab_protocol import InferRequest, Tensor
from trimtab_router.request import RequestOptions
from trimtab_router.scheduling.policies import POLICIES
from trimtab_router.scheduling.policies.interface import Dispatch, Policy, WaitUntil
from trimtab_router.scheduling.replica_slots import Completed, ReplicaLost
from trimtab_router.scheduling.stage_request import EscalationRule

POINTS = [{"name": "default", "accuracy": 0.9}, {"name": "quick", "accuracy": 0.7}]
OUTPUTS = [{"name": "y", "datatype": "FP32", "shape": [4]}, {"name": "sure", "datatype": "FP32"}]
SURE, DOUBTED = 0.9, 0.1
MEASURED = {"measured": 0.25}
"""Share of rows that are doubted, of requests that name this task."""
BY_TASK = {
    "cars": TaskEscalation(confidence_below=0.85, share=0.5, accuracy=0.85),
    "birds": TaskEscalation(confidence_below=0, share=0, accuracy=0.4),
}


def quick_first(view):
    drops = []
    for head in view.waiting:
        points = view.points_for(head)
        if not points:
            drops.append(head)
            continue
        point = points[-1]
        company = view.candidates(head, point)
        by_task = BY_TASK if head.request.options.task not in {"", *MEASURED} else {}
        look = EscalationRule(
            0.5,
            "default",
            accuracy=0.8,
            share=MEASURED.get(head.request.options.task),
            by_task=by_task,
            variant=point.variant,
        )
        again = look if point.name == "quick" else None
        return Dispatch(point, company.first(min(view.max_batch_rows, company.rows)), drops, again)
    return WaitUntil(drops=drops)


class Looking(SchedulerScenario):
    """A stage whose model says how certain it is."""

    def __init__(self, slots=1, points=POINTS, outputs=OUTPUTS, **changes):
        quick = {"name": "quick", "accuracy": 0.7, "serviceSeconds": {1: 0.1, 8: 0.4}}
        stage = {"outputs": outputs, "confidence": "sure", "variants": [a_variant(operatingPoints=points)]}
        policy = Policy(quick_first, uses_fallbacks=True)
        super().__init__(policy, slots=slots, stage=stage, fallbacks=[quick], **changes)

    def answer(self, batch, confidences):
        given, begin = [], 0
        for row_slice in batch.row_slices:
            own = np.array(confidences[begin : begin + row_slice.rows], np.float32)
            y = np.full((row_slice.rows, 4), 100.0 if batch.point.name == "default" else 0.0, np.float32)
            given.append({"y": y + np.arange(row_slice.start, row_slice.stop)[:, None], "sure": own})
            begin += row_slice.rows
        self.scheduler.on_batch_end(batch, Completed(given, batch.point.name))
        self.settle()


@pytest.fixture
def top():
    return Looking()


def looked_at_once(top, rows=4, deadline=100.0):
    work = top.take(rows, deadline)
    top.clock.run(0.2286)  # as long as four rows at the quick point should take
    top.answer(top.sent[0], [SURE, DOUBTED, SURE, DOUBTED][:rows])
    return work


def ys(work):
    return work.owner.outputs["y"][:, 0].tolist()


def mean_accuracy(work):
    return np.average([part.accuracy for part in work.owner.served], weights=[part.rows for part in work.owner.served])


def test_only_low_confidence_rows_escalate(top):
    work = looked_at_once(top)

    assert [(row_slice.start, row_slice.stop) for row_slice in top.sent[1].row_slices] == [(1, 2), (3, 4)]
    assert top.sent[1].point.name == "default"
    assert all(row_slice.provisional_response.operating_point == "quick" for row_slice in top.sent[1].row_slices)
    assert work.owner.outputs is None

    top.answer(top.sent[1], [SURE, SURE])
    assert ys(work) == [0.0, 101.0, 2.0, 103.0]
    assert mean_accuracy(work) == pytest.approx(0.8)
    assert not any(row_slice.escalation_pending for row_slice in work.owner.served)


def test_points_are_listed_of_variants_that_escalate():
    look = {"to": "default", "variant": "small", "confidenceBelow": 0.5, "share": 0.5, "accuracy": 0.85}
    variants = [a_variant("light", accuracy=0.8, escalations=[look]), a_variant("small", accuracy=0.9)]
    top = SchedulerScenario(stage={"outputs": OUTPUTS, "confidence": "sure", "variants": variants})

    assert "default" in {point.name for point in top.scheduler.latency_model.points("light")}


def test_counted_outputs_stay_with_their_rows():
    """A row has as many boxes as its count; the boxes of escalated rows are replaced."""
    counted = [{"name": "n", "datatype": "INT64"}, {"name": "y", "datatype": "FP32", "countedBy": "n"}, OUTPUTS[1]]
    top = Looking(outputs=counted)
    work = top.take(4)

    top.clock.run(0.2286)

    def answer(batch, counts, boxes, confidences):
        outputs = {"n": np.array(counts), "y": np.array(boxes), "sure": np.array(confidences)}
        top.scheduler.on_batch_end(batch, Completed([outputs], batch.point.name))
        top.settle()

    answer(top.sent[0], [1, 2, 0, 3], [0.0, 10.0, 11.0, 30.0, 31.0, 32.0], [SURE, DOUBTED, DOUBTED, SURE])
    (escalated,) = top.sent[1].row_slices
    assert (escalated.start, escalated.stop) == (1, 3)

    second = replace(escalated.provisional_response, rows=1, operating_point="default", escalation_pending=False)
    work.add_result(2, 1, {"n": np.array([1]), "y": np.array([120.0]), "sure": np.array([SURE])}, second)
    work.accept_provisional(1, 3)

    assert work.owner.outputs["n"].tolist() == [1, 2, 1, 3]
    assert work.owner.outputs["y"].tolist() == [0.0, 10.0, 11.0, 120.0, 30.0, 31.0, 32.0]


def test_escalation_with_less_gain_than_profiled_is_reported():
    look = {"to": "default", "confidenceBelow": 0.5, "share": 0.5, "accuracy": 0.8}
    measured = {"source": "Measured"}
    known = [point | {"accuracyEvidence": measured | {"meanConfidence": point["accuracy"]}} for point in POINTS]
    top = Looking(points=[known[0], known[1] | {"escalations": [look]}])
    for batch in range(30):
        top.take(4, top.clock.now + 100.0)
        top.settle()
        for confidences in ([SURE, DOUBTED, SURE, DOUBTED], [DOUBTED + 0.2] * 2 if batch < 5 else [DOUBTED] * 2):
            top.clock.run(top.clock.now + 1.0)
            top.answer(top.sent[-1], confidences)

    accuracies = top.scheduler.accuracy_monitor.drifted_accuracies(top.clock.now)
    assert accuracies[top.scheduler.variant, "default", ""] == pytest.approx(0.7, abs=0.06), (
        "0.2 per escalated row, or 0"
    )
    assert accuracies.get((top.scheduler.variant, "quick", ""), 0.0) < 0.7


@pytest.mark.parametrize("rows", [2, 1])
def test_low_confidence_rows_have_their_profiled_accuracy(top, rows):
    work = top.take(rows, 3.0)
    work.options = RequestOptions(task="measured")
    top.clock.run(0.2)
    top.answer(top.sent[0], [DOUBTED] * rows)
    top.clock.run(3.0)

    (row_slice,) = work.owner.served
    assert row_slice.escalation_pending
    assert row_slice.accuracy == pytest.approx((0.7 - 0.75 * 0.8) / 0.25), "and not 0.7, as of all"


def test_request_at_its_deadline_gets_provisional_response(top):
    work = looked_at_once(top, deadline=3.0)
    top.clock.run(2.99)
    assert work.owner.outputs is None

    top.clock.run(3.0)
    assert ys(work) == [0.0, 1.0, 2.0, 3.0]
    assert mean_accuracy(work) == pytest.approx(0.7)
    assert [row_slice.escalation_pending for row_slice in work.owner.served] == [False, True, False, True]
    top.answer(top.sent[1], [SURE, SURE])
    assert top.scheduler.queue.rows == 0


@pytest.mark.parametrize(("deadline", "looks"), [(1.7, 2), (1.1, 1)])
def test_no_time_for_escalation_returns_response_at_once(top, deadline, looks):
    work = looked_at_once(top, deadline=deadline)

    assert len(top.sent) == looks
    assert (work.owner.outputs is None) == (looks == 2)


def test_lost_replica_during_escalation_keeps_the_response(top):
    work = looked_at_once(top)
    for _ in range(2):
        for batch in [batch for batch in top.sent if batch.replica.computing is batch]:
            top.scheduler.on_batch_end(batch, ReplicaLost("gone"))
            top.settle()
    while work.owner.outputs is None and top.slots[0].computing is not None:
        top.scheduler.on_batch_end(top.slots[0].computing, ReplicaLost("gone"))
        top.settle()

    assert work.owner.refusal is None
    assert ys(work) == [0.0, 1.0, 2.0, 3.0]


def test_plan_without_better_point_accepts_the_response():
    top = Looking()
    top.slots[0].set_ready_variants(READY)
    work = top.take(4)
    top.settle()
    planned = a_plan(builders.a_pipeline(1), operatingPoint="quick", accuracy=0.7, serviceSeconds={1: 0.1, 8: 0.4})
    top.scheduler.apply_plan(planned.spec.stages[0])
    top.answer(top.sent[0], [SURE, DOUBTED, SURE, DOUBTED])

    assert ys(work) == [0.0, 1.0, 2.0, 3.0]
    assert (len(top.sent), top.scheduler.queue.rows) == (1, 0)


def test_disconnected_client_removes_escalated_rows(top):
    work = looked_at_once(top)
    top.scheduler.cancel(work)
    top.answer(top.sent[1], [SURE, SURE])

    assert (work.owner.outputs, top.scheduler.queue.rows, top.scheduler.queue.special_rows) == (None, 0, 0)


@pytest.mark.parametrize(
    ("task", "doubted", "accuracies"), [("cars", [1], {0.85, 0.55}), ("birds", [], {0.4}), ("ships", [], {0.7})]
)
def test_each_task_escalates_by_its_own_threshold(top, task, doubted, accuracies):
    work = top.take(2, options=RequestOptions(task=task))
    top.clock.run(0.2286)
    top.answer(top.sent[0], [SURE, 0.7])

    again = [row_slice for batch in top.sent[1:] for row_slice in batch.row_slices]
    assert [row for row_slice in again for row in range(row_slice.start, row_slice.stop)] == doubted
    if doubted:
        assert all(
            row_slice.escalation == EscalationRule(0.85, "default", 0.85, 0.5, variant="small") for row_slice in again
        )
        top.clock.run(100.0)
    assert {round(row_slice.accuracy, 4) for row_slice in work.owner.served} == accuracies


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


@pytest.mark.parametrize("protocol", ["rest", "grpc"])
@pytest.mark.parametrize("values", [[0.9, 0.1], [0.1, 0.2]], ids=["one row", "all rows"])
async def test_escalated_rows_are_named_by_each_protocol(protocol, values):
    """Rows below 0.5 are escalated to another variant."""

    def small_first(view):
        for head in view.waiting:
            point = view.points_for(head)[-1]
            rule = EscalationRule(0.5, "default", accuracy=0.8, variant="large") if point.variant == "small" else None
            return Dispatch(point, view.candidates(head, point).first(8), [], rule)
        return WaitUntil()

    variants = [a_variant("small", accuracy=0.7), a_variant("large", accuracy=0.9)]
    pipeline = a_pipeline([a_stage("stage-0", outputs=OUTPUTS, confidence="sure", variants=variants)])
    large = {"name": "default", "variant": "large", "accuracy": 0.9, "serviceSeconds": {1: 0.02, 8: 0.04}}
    plan: dict[str, Any] = {"variant": "small", "serviceSeconds": {1: 0.01, 8: 0.02}, "upgrades": [large]}
    replica, policy = Certain(), Policy(small_first, uses_fallbacks=True)
    replica.variants = ("small", "large")
    async with a_rig(pipeline, {"stage-0": [replica]}, policy=policy, **plan) as rig:
        answer = await rig.grpc(a_wishing(values)) if protocol == "grpc" else (await rig.rest(a_wishing(values)))[1]

    reply, escalated = answer.parameters, [value < 0.5 for value in values]
    variants_by_row = ",".join("large" if again else "small" for again in escalated)
    assert reply.get("trimtab.stage-0.variants", "large,large") == variants_by_row
    assert reply["trimtab.stage-0.escalated"] == ",".join(str(again).lower() for again in escalated)
    assert reply["trimtab.stage-0.confidences"] == ",".join(f"{value:g}" for value in values)
    assert "trimtab.stage-0.escalation_pending" not in reply


@pytest.mark.parametrize(("spare", "said"), [(True, [1.0, 2.0, 2.0]), (False, [1.0, 1.0, 1.0])])
async def test_replica_lost_in_a_second_pass_fails_no_row(looking, spare, said):
    """Another replica repeats the second pass; without one, the rows keep their first response."""
    second, passes = asyncio.Event(), count()

    def seconds(point, rows):
        if point != "default" or next(passes):
            return 0.0
        second.set()
        return 60.0

    replicas = [Certain(), *([Certain()] if spare else [])]
    for n, replica in enumerate(replicas):
        replica.name, replica.seconds = f"replica-{n}", seconds
    async with a_rig(a_certain_pipeline(), {"stage-0": replicas}, **PLAN) as rig:
        reply = asyncio.ensure_future(rig.rest(a_wishing([0.9, 0.1, 0.2], timeout=1_500_000)))
        await second.wait()
        await next(replica for replica in replicas if replica.running).kill()
        status, response, _ = await reply

    assert status == 200
    assert response.outputs[0].array[:, 0].tolist() == said
    assert response.parameters.get("trimtab.escalation_pending", False) is not spare


async def test_missed_escalation_is_reported(looking):
    replica = Certain(once=True)
    async with a_rig(a_certain_pipeline(), {"stage-0": [replica]}, **PLAN) as rig:
        status, answer, _ = await rig.rest(a_wishing([0.9, 0.1, 0.2], timeout=3_000_000))

        assert status == 200
        assert answer.outputs[0].array[:, 0].tolist() == [1.0, 1.0, 1.0]
        assert answer.parameters["trimtab.escalation_pending"] is True
        assert answer.parameters["trimtab.stage-0.escalation_pending"] == "false,true,true"
        assert "trimtab.stage-0.escalated" not in answer.parameters
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
