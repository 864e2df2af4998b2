"""Requests that name a task: each replica gets its own index."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from tests.builders import a_stage, a_variant
from tests.router.fakes import FakeReplica, a_pipeline, a_rig, grpc_refusal
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.tasks import NO_TASK
from trimtab_protocol import InferRequest, InferResponse, Tensor
from trimtab_router.execution.task_registry import task_indices_at

NO_INDEX = -7.0
TASKS = ("crops", "faces", "", "signs")
TASK_PARAMETER = "trimtab.stage-0.task"
BY_TASK = {"accuracyByTask": {task: {"value": 0.5, "source": "Declared"} for task in ("crops", "faces", "gone")}}


def a_tasked_pipeline(
    *, optional: bool = True, stage: Mapping[str, Any] = {}, spec: Mapping[str, Any] = {}, **variant: Any
) -> InferencePipeline:
    """One that takes x FP32 [4] and task INT64 [] and gives y FP32 [4]."""
    may: dict[str, Any] = {"optional": True} if optional else {}
    task_input = {"name": "task", "from": "request.inputs.task", **may}
    reads = [{"name": "x", "from": "request.inputs.x"}, task_input]
    tasked = a_stage("stage-0", **{"inputs": reads, "variants": [a_variant(**variant)]} | dict(stage))
    given = [{"name": "x", "datatype": "FP32", "shape": [4]}, {"name": "task", "datatype": "INT64", "shape": [], **may}]
    return a_pipeline([tasked], inputs=given, **spec)


def echo_task_index(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    task = inputs.get("task", np.full(len(inputs["x"]), NO_INDEX))
    return {"y": np.repeat(task.astype(np.float32)[:, None], 4, axis=1)}


def a_tasked_replica(tasks: Sequence[str], name: str = "replica-0", **changes: Any) -> FakeReplica:
    """One that has these tasks, by number."""
    return FakeReplica(model=echo_task_index, name=name, facts=lambda: {"tasks": ",".join(tasks)}, **changes)


def naming(task: str = "", number: int | None = None, rows: int = 1) -> InferRequest:
    tensors = [Tensor.of("x", np.zeros((rows, 4), np.float32))]
    if number is not None:
        tensors.append(Tensor.of("task", np.full(rows, number, np.int64)))
    return InferRequest("sample", tuple(tensors), parameters={"trimtab.task": task} if task else {})


def said(answer: InferResponse) -> list[float]:
    return [float(row[0]) for row in answer.outputs[0].array]


@pytest.mark.parametrize("optional", [True, False])
async def test_task_name_selects_the_task_over_both_protocols(optional):
    async with a_rig(a_tasked_pipeline(optional=optional), {"stage-0": [a_tasked_replica(TASKS)]}) as rig:
        for request, number in [(naming("faces", rows=3), 1.0), (naming("signs"), 3.0), (naming("faces", 1), 1.0)]:
            status, answer, _ = await rig.rest(request)
            over_grpc = await rig.grpc(request)

            assert status == 200, answer
            assert set(said(answer)) == set(said(over_grpc)) == {number}
            assert (
                answer.parameters[TASK_PARAMETER]
                == over_grpc.parameters[TASK_PARAMETER]
                == request.parameters["trimtab.task"]
            )
        _, unnamed, _ = await rig.rest(naming(number=3))

    assert said(unnamed) == [3.0]
    assert TASK_PARAMETER not in unnamed.parameters


async def test_contradicting_task_name_and_index_are_refused():
    async with a_rig(a_tasked_pipeline(), {"stage-0": [a_tasked_replica(TASKS)]}) as rig:
        status, error, _ = await rig.rest(naming("faces", 0))
        code, _ = await grpc_refusal(rig.grpc(naming("faces", 0)))

    assert (status, code) == (400, grpc.StatusCode.INVALID_ARGUMENT)
    assert "names 'faces', which has index 1, but input 'task' has 0" in error


async def test_each_replica_gets_its_own_task_index():
    old, new = a_tasked_replica(TASKS), a_tasked_replica(("faces", "crops"), "replica-1")
    async with a_rig(a_tasked_pipeline(), {"stage-0": [old, new]}) as rig:
        answered = [await rig.rest(naming("faces", 1)) for _ in range(8)]

    assert old.seen
    assert new.seen
    found = [said(answer)[0] for _, answer, _ in answered]
    assert (found.count(1.0), found.count(0.0)) == (len(old.seen), len(new.seen))


async def test_task_lost_by_its_replica_is_served_as_no_task():
    tasks = list(TASKS)
    replica = a_tasked_replica(tasks)
    async with a_rig(a_tasked_pipeline(), {"stage-0": [replica]}, accuracyByTask={"faces": 0.5}) as rig:
        replica.gate.clear()
        first = asyncio.create_task(rig.rest(naming("faces")))
        await replica.arrived.wait()
        waiting = asyncio.create_task(rig.rest(naming("faces")))
        await rig.until(lambda: rig.router.state().stages["stage-0"].queue_rows == 1)
        tasks[:] = ["faces-of-old", "signs"]
        await rig.router.model_metadata("stage-0", "small")
        replica.gate.set()
        await first
        _, late, _ = await waiting
        status, error, _ = await rig.rest(naming("faces"))

    assert said(late) == [-1.0]
    assert (status, "no replica has a task 'faces'; there are: faces-of-old, signs" in error) == (400, True)


async def test_declared_task_without_replica_is_unavailable():
    pipeline = a_tasked_pipeline(tasks=[{"name": "stripes", "storageUri": "s3://tasks/stripes.safetensors"}])
    for facts in ("default", "crops,faces"):
        async with a_rig(pipeline, {"stage-0": [a_tasked_replica(facts.split(","))]}) as rig:
            status, error, headers = await rig.rest(naming("stripes"))

        assert (status, headers["x-trimtab-reason"]) == (503, "NoReplica")
        assert "no replica has task 'stripes' yet" in error


async def test_task_name_is_accepted_once_all_replicas_have_it():
    late = list(TASKS[:2])
    replicas = [a_tasked_replica(TASKS), a_tasked_replica(late, "replica-1")]
    async with a_rig(a_tasked_pipeline(), {"stage-0": replicas}) as rig:
        early = [await rig.rest(naming("signs")) for _ in range(4)]
        late[:] = TASKS
        await rig.router.model_metadata("stage-0", "small")
        whole = [await rig.rest(naming("signs")) for _ in range(4)]

    assert {(status, headers["x-trimtab-reason"]) for status, _, headers in early} == {(503, "NoReplica")}
    assert "not every replica has task 'signs' yet" in early[0][1]
    assert [(status, said(answer)) for status, answer, _ in whole] == [(200, [3.0])] * 4


@pytest.mark.parametrize(
    ("listed", "body"),
    [(("crops", "faces"), 1), (("faces",), 0), (("crops", "other"), NO_TASK), (("crops",), 1), ((), 1)],
)
def test_index_beyond_the_replicas_list_is_kept(listed, body):
    given = np.full(3, 1, np.int64)

    assert task_indices_at("faces", listed, given).tolist() == [body] * 3
    assert task_indices_at("faces", listed, given).dtype == given.dtype


async def test_model_without_task_input_serves_its_first_task():
    stage = a_stage(
        "stage-0",
        variants=[{"name": "small", "family": "echo", "storageUri": "random://?seed=1", "accuracy": 0.9, **BY_TASK}],
    )
    async with a_rig(a_pipeline([stage]), {"stage-0": [a_tasked_replica(TASKS)]}) as rig:
        first = await rig.rest(naming("crops"))
        other = await rig.rest(naming("faces"))

    assert (first[0], first[1].parameters[TASK_PARAMETER], said(first[1])) == (200, "crops", [NO_INDEX])
    assert (other[0], "stage stage-0 has no input 'task'" in other[1]) == (400, True)


async def test_names_of_samples_are_no_tasks_of_a_one_task_model():
    plan: dict[str, Any] = {"accuracyByTask": {"odd": 0.6}}
    for facts in (dict, lambda: {"tasks": "default"}):
        replica = FakeReplica(model=echo_task_index, facts=facts)
        async with a_rig(a_tasked_pipeline(), {"stage-0": [replica]}, **plan) as rig:
            status, answer, _ = await rig.rest(naming("odd"))

        assert (status, said(answer)) == (200, [NO_INDEX])
        assert answer.parameters["trimtab.expected_accuracy"] == 0.6
        assert TASK_PARAMETER not in answer.parameters


async def test_task_input_is_required_without_known_index():
    async with a_rig(
        a_tasked_pipeline(optional=False),
        {"stage-0": [FakeReplica(model=echo_task_index)]},
        accuracyByTask={"odd": 0.6},
    ) as rig:
        assert "input 'task' is missing" in (await rig.rest(naming("odd")))[1]
        assert "unknown task 'even'" in (await rig.rest(naming("even")))[1]
        assert "input 'task' is missing" in (await rig.rest(naming()))[1]


async def test_task_name_is_unavailable_before_first_replica():
    replica = a_tasked_replica(TASKS)
    replica.health.clear()
    async with a_rig(a_tasked_pipeline(), {"stage-0": [replica]}, ready=False, accuracyByTask={"faces": 0.5}) as rig:
        status, error, headers = await rig.rest(naming("faces"))
        replica.health.set()
        await rig.until_ready()

        assert (status, headers["x-trimtab-reason"]) == (503, "NoReplica")
        assert "no replica has reported the index of task 'faces' yet" in error
        assert said((await rig.rest(naming("faces")))[1]) == [1.0]
