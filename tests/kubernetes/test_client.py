"""`Cluster`: client of a real API server."""

import pytest

from trimtab_kubernetes import Cluster, Conflict, Rejected
from trimtab_kubernetes.objects import Object


def a_config_map(namespace: str, name: str = "settings", **data: str) -> Object:
    metadata = {"name": name, "namespace": namespace, "labels": {"test": "client"}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


async def test_field_of_another_manager_is_a_conflict(cluster: Cluster, namespace: str):
    await cluster.apply(a_config_map(namespace, colour="red"), manager="one")

    with pytest.raises(Conflict, match="colour"):
        await cluster.apply(a_config_map(namespace, colour="blue"), manager="two", force=False)


async def test_missing_object_is_none(cluster: Cluster, namespace: str):
    assert await cluster.get("ConfigMap", namespace, "nothing") is None
    assert not await cluster.delete("ConfigMap", namespace, "nothing")


async def test_unknown_field_is_rejected_and_not_retried(cluster: Cluster, namespace: str):
    body = {**a_config_map(namespace), "colour": "red"}

    with pytest.raises(Rejected, match="colour"):
        await cluster.apply(body, manager="one")
