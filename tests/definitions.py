"""Puts CustomResourceDefinitions into a real API server and waits until it serves them."""

from typing import Any

from trimtab_kubernetes import Cluster

KIND = "CustomResourceDefinition"


async def define(cluster: Cluster, *definitions: dict[str, Any]) -> None:
    """Apply them, then return once the API server serves them all."""
    for definition in definitions:
        await cluster.apply(definition, manager="tests")
    for definition in definitions:
        await _established(cluster, definition["metadata"]["name"])


async def _established(cluster: Cluster, name: str) -> None:
    while True:
        listing = await cluster.list(KIND)
        found = next(item for item in listing.items if item["metadata"]["name"] == name)
        # A definition that is seconds old has null where its conditions will be.
        conditions = (found.get("status") or {}).get("conditions") or ()
        if any(condition["type"] == "Established" and condition["status"] == "True" for condition in conditions):
            return
        async for _ in cluster.watch(KIND, None, None, listing.resource_version):
            break
