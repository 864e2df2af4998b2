"""Runtime task registration: authorization, refusals, and terms of a task's requests."""

import io
import json
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders import a_plan
from tests.router.fakes import FakeReplica, a_pipeline, a_request, a_rig, plus_one
from tests.router.test_task_names import a_tasked_pipeline
from trimtab_pipelines.accuracy_evidence import Accuracy
from trimtab_pipelines.router_state import RegisteredAccuracy
from trimtab_pipelines.tasks import MAX_TASK_FILE_BYTES, METADATA_KEY, TaskRecord, parse_file_name, parse_task_record
from trimtab_protocol.extensions import task_metadata
from trimtab_router.envoy.api_keys import HashedKey, format_entry, key_digest, new_key
from trimtab_router.ingress import task_store
from trimtab_router.ingress.admin import AUDIT_LOG
from trimtab_router.ingress.task_api import TaskApi
from trimtab_router.ingress.task_store import TaskFolder, TaskStore
from trimtab_router.router import Router

PATH = "/trimtab/v1/tasks/stage-0/small"
KEY = new_key()
OWN = ("letters", "signs")
"""What the weights hold."""


def a_file(**card: Any) -> bytes:
    """A task file without tensors."""
    card = {"classes": ["no", "yes"], "transformer": f"sha256:{64 * '0'}"} | card
    header = json.dumps({"__metadata__": {METADATA_KEY: json.dumps(card)}}).encode()
    return len(header).to_bytes(8, "little") + header


def measured_of(value: float, confidence: float, low: float) -> Accuracy:
    return Accuracy(value=value, source="Measured", samples=99, low=low, high=0.8, mean_confidence=confidence)


def a_replica(folder: Path, name: str = "replica-0") -> FakeReplica:
    """One that follows the folder, and refuses names that begin with `bad`."""

    def facts() -> dict[str, Any]:
        named = sorted(filter(None, (parse_file_name(path.name) for path in (folder / "stage-0/small").glob("*"))))
        tasks, refused = list(OWN), {}
        for number, task in named:
            if task.startswith("bad"):
                refused[f"{number}-{task}"] = "tensor plain.weight must have another shape"
            else:
                tasks += [""] * (number + 1 - len(tasks))
                tasks[number] = task
        return task_metadata(tasks, refused)

    return FakeReplica(name=name, facts=facts)


def kept_in(folder: Path):
    """Keeps tasks, and knows those that were kept before; one key may register."""
    keys = folder / "keys"
    keys.write_text(f"ann: {format_entry(HashedKey('ann', key_digest(KEY)))}\n")

    async def registry(router: Router) -> TaskApi:
        store = TaskStore(router, TaskFolder(folder))
        await store.read()
        return TaskApi(router, store, keys)

    return registry


async def put(rig, path: str = f"{PATH}/new", content: bytes = a_file(), key: str | None = KEY, method: str = "PUT"):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with rig.session.request(
        method, f"{rig.admin_url}{path}", data=io.BytesIO(content), headers=headers
    ) as answer:
        return answer.status, await answer.json()


async def test_registered_task_reaches_replicas_and_next_router(tmp_path, caplog):
    replicas = [a_replica(tmp_path, f"replica-{n}") for n in range(2)]
    judged = {"default": {"value": 0.75, "source": "Measured", "samples": 100, "low": 0.6, "high": 0.8}}
    wished = {"trimtab.task": "new"}
    with caplog.at_level(logging.INFO, logger=AUDIT_LOG):
        async with a_rig(a_tasked_pipeline(), {"stage-0": replicas}, registry=kept_in(tmp_path)) as rig:
            unknown = await rig.rest(a_request(parameters=wished))
            status, body = await put(rig, content=a_file(accuracyByPoint=judged))
            _, answer, _ = await rig.rest(a_request(parameters=wished))
            _, listed = await rig.get("/trimtab/v1/tasks")

    assert unknown[0] == 400
    assert "unknown task 'new'" in unknown[1]
    assert (status, body["task"], body["number"], body["replicas"], body["waiting"]) == (201, "new", 2, 2, 0)
    assert answer.parameters["trimtab.expected_accuracy"] == 0.75
    assert listed["stage-0"]["small"]["new"]["number"] == 2
    line = next(json.loads(record.message) for record in caplog.records if "PUT" in record.message)
    assert (line["by"], line["status"], line["path"]) == ("ann", 201, f"{PATH}/new")

    async with a_rig(a_tasked_pipeline(), {"stage-0": [a_replica(tmp_path)]}, registry=kept_in(tmp_path)) as rig:
        _, again, _ = await rig.rest(a_request(parameters=wished))
        assert again.parameters["trimtab.expected_accuracy"] == 0.75
        assert (await put(rig, f"{PATH}/newer"))[1]["number"] == 3


async def test_registration_requires_an_admin_key(tmp_path):
    async with a_rig(a_tasked_pipeline(), {"stage-0": [a_replica(tmp_path)]}, registry=kept_in(tmp_path)) as rig:
        for key in (None, "", new_key(), key_digest(KEY), "é"):
            assert (await put(rig, key=key))[0] == 401, key
        assert (await put(rig, method="DELETE", key=None))[0] == 401
        for method in ("POST", "GET"):
            assert (await put(rig, method=method, key=None))[0] == 401
            assert (await put(rig, method=method))[0] == 405
        (tmp_path / "keys").write_text("")
        assert (await put(rig))[0] == 401  # as soon as the key is gone
    assert not list(tmp_path.glob("*/*/*"))


async def test_deleted_task_is_unloaded_and_its_index_not_reused(tmp_path):
    replicas = [a_replica(tmp_path, f"replica-{n}") for n in range(2)]
    wished = {"trimtab.task": "new"}
    async with a_rig(a_tasked_pipeline(), {"stage-0": replicas}, registry=kept_in(tmp_path)) as rig:
        await put(rig, content=a_file(utility=0.5))
        status, body = await put(rig, method="DELETE")
        unknown = await rig.rest(a_request(parameters=wished))
        again = await put(rig, method="DELETE")
        weights = await put(rig, f"{PATH}/signs", method="DELETE")
        newer = await put(rig, f"{PATH}/newer")
        _, listed = await rig.get("/trimtab/v1/tasks")

    assert (status, body["number"], body["replicas"], body["waiting"]) == (200, 2, 2, 0)
    assert (unknown[0], "unknown task 'new'" in unknown[1]) == (400, True)
    assert (again[0], "no task 'new' is registered" in again[1]["error"]) == (404, True)
    assert weights[0] == 404
    assert (newer[0], newer[1]["number"]) == (201, 3)
    assert list(listed["stage-0"]["small"]) == ["newer"]
    assert sorted(path.name for path in tmp_path.glob("*/*/*")) == ["2-new.removed", "3-newer.safetensors"]

    async with a_rig(a_tasked_pipeline(), {"stage-0": [a_replica(tmp_path)]}, registry=kept_in(tmp_path)) as rig:
        assert (await put(rig, f"{PATH}/newer", method="DELETE"))[0] == 200
        assert (await put(rig))[1]["number"] == 4  # the next router knows whose numbers they were


async def test_state_reports_tasks_and_deletion_is_permanent(tmp_path):
    judged = {"value": 0.75, "source": "Measured", "samples": 99, "low": 0.7, "high": 0.8, "meanConfidence": 0.9}
    wished = {"trimtab.task": "new"}
    async with a_rig(a_tasked_pipeline(), {"stage-0": [a_replica(tmp_path)]}, registry=kept_in(tmp_path)) as rig:
        await put(rig, content=a_file(accuracyByPoint={"default": judged}))
        body = (await rig.get("/trimtab/v1/state"))[1]["stages"]["stage-0"]["registered_accuracies"]
        await put(rig, method="DELETE")
        after = (await rig.get("/trimtab/v1/state"))[1]["stages"]["stage-0"]["registered_accuracies"]
        plan = a_plan(rig.router.pipeline, 2, accuracyByTask={"new": 0.75})
        rig.router.apply_plan(plan)
        deleted = await rig.rest(a_request(parameters=wished))

    heard = {"mean_confidence" if name == "meanConfidence" else name: one for name, one in judged.items()}
    assert (body, after) == ({"small": {"default": {"new": heard}}}, {})
    assert deleted[0] == 400

    async with a_rig(a_tasked_pipeline(), {"stage-0": [a_replica(tmp_path)]}, registry=kept_in(tmp_path)) as rig:
        rig.router.apply_plan(plan)
        assert (await rig.rest(a_request(parameters=wished)))[0] == 400
        await put(rig, content=a_file())
        assert (await rig.rest(a_request(parameters=wished)))[0] == 200


@pytest.mark.parametrize(("basis", "expected"), [("Expected", 0.75), ("LowerBound", 0.7)])
async def test_declared_task_has_the_accuracies_of_its_record(basis, expected):
    judged = measured_of(0.75, 0.9, low=0.7)
    cards = {task: {"default": judged, "elsewhere": judged} for task in ("named", "known", "letters")}
    replica = FakeReplica(facts=lambda: task_metadata([*OWN, "named", "known"], {}, cards))
    known = {"known": {"value": 0.5, "source": "Measured"}}
    tasks = [{"name": name, "storageUri": f"{name}.safetensors"} for name in ("named", "known")]
    objective = {"objective": {"accuracyBasis": basis}}
    pipeline = a_tasked_pipeline(tasks=tasks, accuracyByTask=known, spec=objective)
    async with a_rig(pipeline, {"stage-0": [replica]}, accuracyByTask={"known": 0.5}) as rig:
        found = [(await rig.rest(a_request(parameters={"trimtab.task": task})))[1] for task in ("named", "known")]
        body = (await rig.get("/trimtab/v1/state"))[1]["stages"]["stage-0"]["registered_accuracies"]
        rig.router.apply_plan(a_plan(pipeline, 2, accuracyByTask={"named": 0.6}))
        planned = (await rig.rest(a_request(parameters={"trimtab.task": "named"})))[1]

    assert [answer.parameters["trimtab.expected_accuracy"] for answer in found] == [expected, 0.5]
    assert body["small"]["default"]["named"] == RegisteredAccuracy.of(judged).model_dump()
    assert "letters" not in body["small"]["default"], "it is of the weights, of which the pipeline tells"
    assert "known" not in body["small"]["default"], "what the pipeline tells of a task counts"
    assert planned.parameters["trimtab.expected_accuracy"] == 0.6, "a plan may know of a drift"


async def test_rows_of_a_task_that_joined_are_held_against_its_card(tmp_path):
    """The replica says 0.5 of each row, of which 0.9 was measured."""
    replica = a_replica(tmp_path)
    replica.model = lambda inputs: {**plus_one(inputs), "sure": np.full(len(inputs["x"]), 0.5, np.float32)}
    outputs = [{"name": "y", "datatype": "FP32", "shape": [4]}, {"name": "sure", "datatype": "FP32"}]
    pipeline = a_tasked_pipeline(stage={"outputs": outputs, "confidence": "sure"})
    judged = {"default": measured_of(0.75, 0.9, low=0.7).model_dump(by_alias=True)}
    wished = {"trimtab.task": "new"}
    async with a_rig(pipeline, {"stage-0": [replica]}, registry=kept_in(tmp_path)) as rig:
        await put(rig, content=a_file(accuracyByPoint=judged))
        for _ in range(110):
            assert (await rig.rest(a_request(parameters=wished)))[0] == 200
        body = (await rig.get("/trimtab/v1/state"))[1]["stages"]["stage-0"]["drifted_by_task"]
        await put(rig, method="DELETE")
        after = (await rig.get("/trimtab/v1/state"))[1]["stages"]["stage-0"]["drifted_by_task"]

    assert body == {"default": {"new": pytest.approx(0.75 - 0.4, abs=0.06)}}
    assert after == {}


async def test_invalid_task_is_refused_and_leaves_no_file(tmp_path):
    async with a_rig(a_tasked_pipeline(), {"stage-0": [a_replica(tmp_path)]}, registry=kept_in(tmp_path)) as rig:
        assert (await put(rig))[0] == 201
        for path, content, status, words in [
            (f"{PATH}/new", a_file(), 409, "has a task 'new' already"),
            (f"{PATH}/signs", a_file(), 409, "has a task 'signs' already"),
            (f"{PATH}/bad", a_file(), 400, "plain.weight must have another shape"),
            (f"{PATH}/Bad_Name", a_file(), 400, "a name has lower-case letters"),
            (f"{PATH}/more", b"no file", 400, "not a safetensors file"),
            (f"{PATH}/more", a_file(classes=["one"]), 400, "task record: classes"),
            (f"{PATH}/more", a_file(accuracyByPoint={"fast": {"value": 1}}), 400, "unknown operating point 'fast'"),
            (f"{PATH}/more", bytes(MAX_TASK_FILE_BYTES + 1), 413, "at most 16 MiB"),
            ("/trimtab/v1/tasks/stage-0/large/more", a_file(), 404, "no variant 'large'"),
            ("/trimtab/v1/tasks/stage-7/small/more", a_file(), 404, "no stage 'stage-7'"),
            ("/trimtab/v1/tasks/stage-0/small", a_file(), 404, "STAGE/VARIANT/NAME"),
            (f"{PATH}/../more", a_file(), 404, ""),
        ]:
            found, body = await put(rig, path, content)
            assert (found, words in body["error"]) == (status, True), (path, body)
    assert [path.name for path in tmp_path.glob("*/*/*")] == ["2-new.safetensors"]


async def test_task_files_are_parsed_in_threads(tmp_path, monkeypatch):
    parsing = set()

    def parse(content: bytes) -> TaskRecord:
        parsing.add(threading.current_thread() is threading.main_thread())
        return parse_task_record(content)

    monkeypatch.setattr(task_store, "parse_task_record", parse)
    async with a_rig(a_tasked_pipeline(), {"stage-0": [a_replica(tmp_path)]}, registry=kept_in(tmp_path)) as rig:
        assert (await put(rig))[0] == 201
        assert (await put(rig, method="DELETE"))[0] == 200
    assert parsing == {False}


async def test_change_is_pending_until_every_replica_follows(tmp_path, monkeypatch):
    monkeypatch.setattr(task_store, "LOAD_SECONDS", 0.1)
    tasks = [*OWN]
    slow = FakeReplica(name="replica-1", facts=lambda: task_metadata(tasks, {}))
    async with a_rig(a_tasked_pipeline(), {"stage-0": [a_replica(tmp_path), slow]}, registry=kept_in(tmp_path)) as rig:
        answers = [await put(rig)]
        tasks.append("new")
        answers.append(await put(rig, method="DELETE"))
        early, why = await put(rig)

    assert [(status, body["replicas"], body["waiting"]) for status, body in answers] == [(202, 1, 1)] * 2
    assert (early, "has a task 'new' already" in why["error"]) == (409, True)


async def test_registration_requires_a_replica_and_a_folder(tmp_path):
    async with a_rig(a_tasked_pipeline(), {"stage-0": []}, registry=kept_in(tmp_path), ready=False) as rig:
        assert (await put(rig))[0] == 503

    async with a_rig(a_tasked_pipeline(), {"stage-0": [FakeReplica()]}) as rig:
        status, body = await put(rig)
        assert (status, "--tasks" in body["error"]) == (501, True)


async def test_registration_requires_a_task_input(tmp_path):
    async with a_rig(a_pipeline(1), {"stage-0": [a_replica(tmp_path)]}, registry=kept_in(tmp_path)) as rig:
        status, body = await put(rig)

    assert status == 400
    assert "stage stage-0 has no input 'task'" in body["error"]
    assert "{name: task, from: request.inputs.task}" in body["error"]
    assert not list(tmp_path.glob("*/*/*"))
