"""Registered tasks in ConfigMaps of a real API server: several routers, conflicts, limits and invalid content."""

import asyncio
import base64
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import pytest

from tests.builders import a_variant
from tests.router.fakes import FakeReplica, Rig, a_request, a_rig
from tests.router.test_task_names import a_tasked_pipeline
from tests.router.test_tasks import KEY, OWN, PATH, a_file, put
from trimtab_kubernetes import Cluster
from trimtab_pipelines.kubernetes_names import tasks_name
from trimtab_pipelines.spec import InferencePipeline
from trimtab_pipelines.tasks import parse_file_name
from trimtab_protocol.extensions import task_metadata
from trimtab_router.envoy.api_keys import HashedKey, format_entry, key_digest
from trimtab_router.ingress import task_store
from trimtab_router.ingress.task_api import TaskApi
from trimtab_router.ingress.task_config_maps import MAX_BYTES, TaskConfigMaps
from trimtab_router.ingress.task_store import TaskRefused, TaskStore
from trimtab_router.router import Router


@pytest.fixture
async def pipeline(cluster: Cluster, namespace: str) -> InferencePipeline:
    """A pipeline with the empty ConfigMap that the operator creates."""
    await create(cluster, namespace, "small")
    return a_tasked_pipeline().with_metadata(namespace=namespace)


async def create(cluster: Cluster, namespace: str, variant: str, content: Mapping[str, bytes] | None = None) -> None:
    metadata = {"name": tasks_name("sample", "stage-0", variant), "namespace": namespace}
    data = {name: base64.b64encode(each).decode() for name, each in (content or {}).items()}
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "binaryData": data}
    await cluster.apply(body, manager="hand")


async def stored(cluster: Cluster, namespace: str, variant: str = "small") -> dict[str, bytes]:
    found = await cluster.get("ConfigMap", namespace, tasks_name("sample", "stage-0", variant))
    assert found is not None
    return {name: base64.b64decode(content) for name, content in found.get("binaryData", {}).items()}


@contextlib.asynccontextmanager
async def a_router(cluster: Cluster, pipeline: InferencePipeline, folder: Any, tasks: list[str]) -> AsyncIterator[Rig]:
    """A router of its own, whose replica has these tasks."""
    keys, watching = folder / "keys", []
    keys.mkdir(exist_ok=True)
    (keys / "ann").write_text(format_entry(HashedKey("ann", key_digest(KEY))))

    async def registry(router: Router) -> TaskApi:
        config_maps = TaskConfigMaps(cluster, pipeline)
        store = TaskStore(router, config_maps)
        await store.read()
        watching.append(asyncio.create_task(config_maps.watch(store.apply)))
        return TaskApi(router, store, keys)

    replica = FakeReplica(facts=lambda: task_metadata(tasks, {}))
    try:
        async with a_rig(pipeline, {"stage-0": [replica]}, registry=registry) as rig:
            yield rig
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


async def until(get: Callable[[], Awaitable[Any]], expected: Any) -> None:
    async with asyncio.timeout(20):
        while await get() != expected:  # noqa: ASYNC110 - a watch of the router brings it
            await asyncio.sleep(0.02)


async def status_of_request(rig: Rig) -> int:
    return int((await rig.rest(a_request(parameters={"trimtab.task": "new"})))[0])


async def tasks_of(rig: Rig) -> Any:
    return (await rig.get("/trimtab/v1/tasks"))[1]["stage-0"]["small"]


async def names_of_tasks(rig: Rig) -> list[str]:
    return list(await tasks_of(rig))


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replicas of these tests follow no ConfigMap."""
    monkeypatch.setattr(task_store, "LOAD_SECONDS", 0.1)


async def test_all_routers_know_registered_and_deleted_tasks(cluster, namespace, pipeline, tmp_path):
    tasks = [*OWN]
    async with (
        a_router(cluster, pipeline, tmp_path, tasks) as one,
        a_router(cluster, pipeline, tmp_path, tasks) as other,
    ):
        status, body = await put(one, content=a_file(utility=0.5))
        assert (status, body["number"], body["replicas"], body["waiting"]) == (202, 2, 0, 1)
        assert await stored(cluster, namespace) == {"2-new.safetensors": a_file(utility=0.5)}
        await until(partial(status_of_request, other), 503)  # known, but no replica has it yet
        tasks.append("new")
        listed = (await tasks_of(other))["new"]
        assert (listed["number"], listed["replicas"], listed["waiting"]) == (2, 1, 0)
        await until(partial(status_of_request, other), 200)

        assert (await put(other))[0] == 409
        assert (await put(other, method="DELETE"))[0] == 202  # the replica still has it
        await until(partial(status_of_request, one), 400)
        assert await stored(cluster, namespace) == {"2-new.removed": b""}
        tasks.pop()
    async with a_router(cluster, pipeline, tmp_path, tasks) as later:
        assert (await put(later, f"{PATH}/newer"))[1]["number"] == 3


async def test_concurrent_registrations_get_separate_numbers(cluster, namespace, pipeline, tmp_path):
    async with contextlib.AsyncExitStack() as routers:
        rigs = [await routers.enter_async_context(a_router(cluster, pipeline, tmp_path, [*OWN])) for _ in range(3)]
        answers = await asyncio.gather(*(put(rig, f"{PATH}/task-{n}") for n, rig in enumerate(rigs)))
        same = await asyncio.gather(*(put(rig, f"{PATH}/same") for rig in rigs))

    assert sorted((status, body["number"]) for status, body in answers) == [(202, 2), (202, 3), (202, 4)]
    assert sorted(status for status, _ in same) == [202, 409, 409]
    numbers = [parse_file_name(name) for name in await stored(cluster, namespace)]
    assert sorted(number for number, _ in filter(None, numbers)) == [2, 3, 4, 5]


async def test_version_seen_before_its_tasks_is_not_overwritten(cluster, namespace, pipeline):
    """The watch sees another router's task after this router chose a number, and before it writes."""

    class Seen(TaskConfigMaps):
        async def write(self, stage, variant, files, changes):
            await create(cluster, namespace, "small", {"2-other.safetensors": a_file()})
            await self.read(stage, variant)
            return await super().write(stage, variant, files, changes)

    replica = FakeReplica(facts=lambda: task_metadata(OWN, {}))
    async with a_rig(pipeline, {"stage-0": [replica]}) as rig:
        task = await TaskStore(rig.router, Seen(cluster, pipeline)).register("stage-0", "small", "new", a_file())

    assert task.index == 3
    assert {*await stored(cluster, namespace)} == {"2-other.safetensors", "3-new.safetensors"}


async def test_number_taken_for_another_variant_is_given_back(cluster, namespace, tmp_path):
    """Another router registers its task between the choice of a number and the write."""
    variants = [a_variant("small"), a_variant("large", accuracy=0.95)]
    pipeline = a_tasked_pipeline(stage={"variants": variants}).with_metadata(namespace=namespace)
    for variant in variants:
        await create(cluster, namespace, variant["name"])

    class Late(TaskConfigMaps):
        async def write(self, stage, variant, files, changes):
            await create(cluster, namespace, "large", {"2-other.safetensors": a_file()})
            return await super().write(stage, variant, files, changes)

    replica = FakeReplica(facts=lambda: task_metadata(OWN, {}))
    async with a_rig(pipeline, {"stage-0": [replica]}) as rig:
        store = TaskStore(rig.router, Late(cluster, pipeline))
        with pytest.raises(TaskRefused, match="at the same time") as refused:
            await store.register("stage-0", "small", "new", a_file())

    assert refused.value.status == 409
    assert await stored(cluster, namespace) == {}


async def test_task_that_does_not_fit_is_refused_with_the_limit(cluster, namespace, pipeline, tmp_path):
    first = a_file() + bytes(600_000)
    async with a_router(cluster, pipeline, tmp_path, [*OWN]) as rig:
        assert (await put(rig, content=first))[0] == 202
        status, body = await put(rig, f"{PATH}/more", content=first)
        left = MAX_BYTES - len(first) - len(a_file())
        exact, _ = await put(rig, f"{PATH}/exact", content=a_file() + bytes(left))
        full, _ = await put(rig, f"{PATH}/full")

    assert (status, exact, full) == (413, 202, 413)
    assert str(MAX_BYTES) in body["error"]
    assert str(len(first)) in body["error"]
    assert sum(map(len, (await stored(cluster, namespace)).values())) == MAX_BYTES


async def test_invalid_content_is_skipped_by_name(cluster, namespace, pipeline, tmp_path, caplog):
    content = {"2-new.safetensors": a_file(), "3-bad.safetensors": b"no task", "README": b"\xff"}
    async with a_router(cluster, pipeline, tmp_path, [*OWN, "new"]) as rig:
        with caplog.at_level(logging.WARNING):
            await create(cluster, namespace, "small", content)
            await until(partial(names_of_tasks, rig), ["new"])

    assert "3-bad.safetensors is skipped" in caplog.text


async def test_missing_config_map_is_an_error_of_the_request(cluster, namespace, tmp_path):
    pipeline = a_tasked_pipeline().with_metadata(namespace=namespace)
    async with a_router(cluster, pipeline, tmp_path, [*OWN]) as rig:
        missing = await put(rig)
        await create(cluster, namespace, "small")
        assert (await put(rig))[0] == 202
        name = tasks_name("sample", "stage-0", "small")
        await cluster.delete("ConfigMap", namespace, name)
        await until(partial(tasks_of, rig), {})

    assert (missing[0], "the operator creates" in missing[1]["error"]) == (503, True)
