"""Installation of CustomResourceDefinitions into a real API server."""

import asyncio
from typing import Any

from trimtab_kubernetes import Cluster
from trimtab_kubernetes.errors import NotFound, Unreachable
from trimtab_kubernetes.kinds import Kind

KIND = "CustomResourceDefinition"


async def define(cluster: Cluster, *definitions: dict[str, Any]) -> None:
    """Apply them, then return once the API server serves them all."""
    for definition in definitions:
        await cluster.apply(definition, manager="tests")
    for definition in definitions:
        await _established(cluster, definition["metadata"]["name"])
        await _served(cluster, _kind_of(definition["spec"]))


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


async def _served(cluster: Cluster, kind: Kind) -> None:
    """Wait until objects of the kind can be listed: a moment after the server says that it is established."""
    async with asyncio.timeout(60):
        while True:
            try:
                await cluster.list(kind)
            except (NotFound, Unreachable):
                await asyncio.sleep(0.05)
            else:
                return


def _kind_of(spec: dict[str, Any]) -> Kind:
    names, version = spec["names"], spec["versions"][0]["name"]
    return Kind(f"{spec['group']}/{version}", names["kind"], names["plural"], spec["scope"] == "Namespaced")
