"""Fixtures that tests of several components share."""

import os
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests import control_plane
from trimtab_kubernetes import Cluster
from trimtab_pipelines import crd


@pytest.fixture(scope="session")
def kubeconfig() -> Iterator[Path]:
    """The kubeconfig of a real API server: where TRIMTAB_TEST_KUBECONFIG points, else one of our own, without nodes."""
    given = os.environ.get("TRIMTAB_TEST_KUBECONFIG")
    if given:
        yield Path(given)
        return
    with control_plane.api_server() as path:
        yield path


@pytest.fixture
async def cluster(kubeconfig: Path) -> AsyncIterator[Cluster]:
    """A connection as administrator, with our kinds defined."""
    async with await Cluster.connect(str(kubeconfig)) as connected:
        await _define(connected)
        yield connected


@pytest.fixture
async def namespace(cluster: Cluster) -> AsyncIterator[str]:
    """A namespace of the test's own."""
    name = f"test-{uuid.uuid4().hex[:10]}"
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    await cluster.create(body, manager="tests")
    yield name
    await cluster.delete("Namespace", None, name)


async def _define(connected: Cluster) -> None:
    for definition in crd.render():
        await connected.apply(definition, manager="tests")
    for definition in crd.render():
        await _established(connected, definition["metadata"]["name"])


async def _established(connected: Cluster, name: str) -> None:
    while True:
        listing = await connected.list("CustomResourceDefinition")
        found = next(item for item in listing.items if item["metadata"]["name"] == name)
        conditions = {c["type"]: c["status"] for c in found.get("status", {}).get("conditions", [])}
        if conditions.get("Established") == "True":
            return
        version = listing.resource_version
        async for _ in connected.watch("CustomResourceDefinition", None, None, version):
            break
