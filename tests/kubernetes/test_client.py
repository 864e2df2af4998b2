"""`Cluster`: client of a real API server."""

import asyncio
from pathlib import Path

import pytest
import yaml

from trimtab_kubernetes import Change, Cluster, Conflict, Rejected, list_and_watch
from trimtab_kubernetes.objects import Object
from trimtab_pipelines.kubernetes_names import ADAPTER_MANAGER, OPERATOR_MANAGER

EXAMPLES = Path(__file__).parents[2] / "pipelines"


def a_config_map(namespace: str, name: str = "settings", **data: str) -> Object:
    metadata = {"name": name, "namespace": namespace, "labels": {"test": "client"}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


async def test_applied_object_exists(cluster: Cluster, namespace: str):
    await cluster.apply(a_config_map(namespace, colour="red"), manager="one")

    found = await cluster.get("ConfigMap", namespace, "settings")

    assert found is not None
    assert found["data"] == {"colour": "red"}


async def test_apply_is_idempotent(cluster: Cluster, namespace: str):
    first = await cluster.apply(a_config_map(namespace, colour="red"), manager="one")
    second = await cluster.apply(a_config_map(namespace, colour="red"), manager="one")

    assert second["metadata"]["resourceVersion"] == first["metadata"]["resourceVersion"]


async def test_field_of_another_manager_is_a_conflict(cluster: Cluster, namespace: str):
    await cluster.apply(a_config_map(namespace, colour="red"), manager="one")

    with pytest.raises(Conflict, match="colour"):
        await cluster.apply(a_config_map(namespace, colour="blue"), manager="two", force=False)


async def test_missing_object_is_none(cluster: Cluster, namespace: str):
    assert await cluster.get("ConfigMap", namespace, "nothing") is None
    assert not await cluster.delete("ConfigMap", namespace, "nothing")


async def test_watch_yields_existing_and_new_objects(cluster: Cluster, namespace: str):
    await cluster.apply(a_config_map(namespace, "first"), manager="one")
    changes: asyncio.Queue[Change] = asyncio.Queue()

    async def watch() -> None:
        async for change in list_and_watch(cluster, "ConfigMap", namespace, "test=client"):
            await changes.put(change)

    task = asyncio.create_task(watch())
    first, synced = await changes.get(), await changes.get()
    await cluster.apply(a_config_map(namespace, "second"), manager="one")
    second = await changes.get()
    await cluster.delete("ConfigMap", namespace, "first")
    gone = await changes.get()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert (first.key, synced.synced) == ((namespace, "first"), True)
    assert second.key == (namespace, "second")
    assert gone.deleted
    assert gone.key == (namespace, "first")


async def test_example_is_accepted_and_misspelt_field_rejected(cluster: Cluster, namespace: str):
    example = yaml.safe_load((EXAMPLES / "digits" / "pipeline.yaml").read_text())
    example["metadata"]["namespace"] = namespace
    await cluster.apply(example, manager="user")
    example["spec"]["stages"][0]["minReplicas"] = 0

    with pytest.raises(Rejected, match="minReplicas"):
        await cluster.apply(example, manager="user")


async def test_unknown_field_is_rejected_and_not_retried(cluster: Cluster, namespace: str):
    body = {**a_config_map(namespace), "colour": "red"}

    with pytest.raises(Rejected, match="colour"):
        await cluster.apply(body, manager="one")


async def test_two_writers_share_the_conditions(cluster: Cluster, namespace: str):
    example = yaml.safe_load((EXAMPLES / "digits" / "pipeline.yaml").read_text())
    example["metadata"]["namespace"] = namespace
    await cluster.apply(example, manager="user")

    def status(kind: str) -> Object:
        condition = {"type": kind, "status": "True", "reason": "Fine", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        head = {"apiVersion": example["apiVersion"], "kind": "InferencePipeline"}
        return {**head, "metadata": {"name": "digits", "namespace": namespace}, "status": {"conditions": [condition]}}

    await cluster.apply(status("Ready"), manager=OPERATOR_MANAGER, subresource="status")
    found = await cluster.apply(status("ForecastReady"), manager=ADAPTER_MANAGER, subresource="status")

    assert {condition["type"] for condition in found["status"]["conditions"]} == {"Ready", "ForecastReady"}
