"""A task registered while requests come: on every replica, and still there when all of them have died."""

import asyncio
import os
import signal
from typing import Any

import httpx
import numpy as np

from tests.builders import a_plan
from tests.cli.pipelines import TASK_INPUT, a_transformer_pipeline
from tests.cli.test_supervisor import until
from tests.model_servers.transformer.test_family import IMAGE, SHAPE
from tests.model_servers.transformer.test_family import weights as weights  # noqa: PLC0414  (a fixture)
from tests.model_servers.transformer.test_task_registry import a_task
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_pipelines.documents import dump_yaml, load_pipeline
from trimtab_router.envoy.api_keys import HashedKey, format_entry, key_digest, new_key

INPUTS = (IMAGE, TASK_INPUT)
VARIANT = {"storageUri": "small.safetensors", "resources": {"cpu": "500m", "memory": "64Mi"}}


def body(task: int | None = None, name: str = "") -> dict[str, Any]:
    image = np.zeros(SHAPE.side**2, np.uint8).tolist()
    inputs = [{"name": "image", "datatype": "UINT8", "shape": [1, 1, SHAPE.side, SHAPE.side], "data": image}]
    if task is not None:
        inputs.append({"name": "task", "datatype": "INT64", "shape": [1], "data": [task]})
    return {"inputs": inputs, "parameters": {"trimtab.task": name} if name else {}}


async def test_registered_task_outlives_all_replicas(weights, tmp_path):
    (tmp_path / "small.safetensors").symlink_to(weights)
    (tmp_path / "pipeline.yaml").write_text(dump_yaml(a_transformer_pipeline(INPUTS, "20s", **VARIANT)))
    key = new_key()
    (tmp_path / "keys").write_text(f"ann: {format_entry(HashedKey('ann', key_digest(key)))}\n")
    plan = a_plan(load_pipeline(tmp_path), replicas=2, cores=0.5)
    setup = Setup(tmp_path / "pipeline.yaml", tmp_path / "run", plan=plan, proxy=False, admin_keys=tmp_path / "keys")
    task = a_task(tmp_path / "task.safetensors", weights, likeliest=1, ways={"plain": None})
    async with Supervisor(setup) as local, httpx.AsyncClient(timeout=60, trust_env=False) as client:
        await local.ready()

        async def ask(task: int | None = None, name: str = "") -> httpx.Response:
            url = f"http://127.0.0.1:{local.rest_port}/v2/models/sample/infer"
            return await client.post(url, json=body(task, name))

        async def label(task: int | None = None, name: str = "") -> int:
            answer = await ask(task, name)
            assert answer.status_code == 200, answer.text
            assert answer.json()["parameters"].get("trimtab.classify.task", "") == name
            return int(answer.json()["outputs"][0]["data"][0])

        url = f"http://127.0.0.1:{local.admin_port}/trimtab/v1/tasks/classify/vit/late"
        others, stop = [], asyncio.Event()

        async def keep_asking() -> None:
            while not stop.is_set():
                others.append(await label(0))

        asking = asyncio.create_task(keep_asking())
        assert (await client.put(url, content=task.read_bytes())).status_code == 401
        assert await label(2) == -1
        registered = await client.put(url, content=task.read_bytes(), headers={"Authorization": f"Bearer {key}"})
        assert registered.status_code == 201, registered.text
        assert (registered.json()["number"], registered.json()["replicas"]) == (2, 2)
        assert [await label(2) for _ in range(8)] == [1] * 8
        assert [await label(name="late") for _ in range(8)] == [1] * 8
        refused = await ask(0, "late")
        assert (refused.status_code, "index 2" in refused.text) == (400, True)

        stop.set()
        await asking
        before = set(local.replica_manager.pids.values())
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        await until(
            lambda: len(set(local.replica_manager.pids.values()) - before) == 2, "both replicas were replaced", None
        )

        assert [await label(2) for _ in range(8)] == [1] * 8
        assert [await label(name="late") for _ in range(8)] == [1] * 8
        assert len(set(others)) == 1
        assert others[0] >= 0
