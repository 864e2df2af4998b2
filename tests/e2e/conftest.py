"""Fixtures of tests on a real node, and of tests of an installation in a cluster."""

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e import node
from tests.e2e.installation import Installation, installed
from trimtab_kubernetes import Cluster


@pytest.fixture(scope="session")
def node_kubeconfig() -> Iterator[Path]:
    """A cluster with a node: the one that is there, else one of our own, taken down in the end."""
    given = node.given()
    if given is not None:
        yield given
        return
    node.require_node()
    kept = node.running()
    yield Path(node.script("up"))
    if not kept:
        node.script("down")


@pytest.fixture
async def node_cluster(node_kubeconfig: Path) -> AsyncIterator[Cluster]:
    async with await Cluster.connect(str(node_kubeconfig)) as connected:
        yield connected


@pytest.fixture
async def restricted_namespace(node_cluster: Cluster) -> AsyncIterator[str]:
    """A namespace that admits only pods of the restricted level."""
    name = f"test-{uuid.uuid4().hex[:10]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    await node_cluster.create(body, manager="tests")
    yield name
    await node_cluster.delete("Namespace", None, name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def installation() -> AsyncIterator[Installation]:
    """Trimtab in a cluster; the node of hack/cluster keeps running afterwards."""
    if node.given() is None:
        node.require_node()
    async with installed() as found:
        yield found
