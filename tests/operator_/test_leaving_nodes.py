"""Replicas and routers on nodes that are about to go: successors first, then the cluster deletes the right pods."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from tests.builders import a_pipeline_document
from tests.operator_.conftest import SETTINGS, Site
from tests.operator_.fake_controllers import Machinery
from trimtab_kubernetes import Cluster
from trimtab_kubernetes.objects import Key
from trimtab_operator.pipeline_cache import PipelineCache
from trimtab_operator.reconciliation.leaving_nodes import leaving_reason
from trimtab_operator.reconciliation.observed_state import DELETION_COST


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({}, ""),
        ({"unschedulable": True}, "cordoned"),
        ({"taints": [{"key": "gpu", "effect": "NoSchedule"}]}, ""),
        ({"taints": [{"key": "karpenter.sh/disrupted"}], "unschedulable": True}, "taint karpenter.sh/disrupted"),
        ({"taints": [{"key": "aws-node-termination-handler/spot-itn"}]}, "taint aws-node-termination-handler/spot-itn"),
        (
            {"taints": [{"key": "gpu"}, {"key": "node.kubernetes.io/unreachable"}]},
            "taint node.kubernetes.io/unreachable",
        ),
    ],
)
def test_node_leaves_if_cordoned_reclaimed_or_lost(spec: dict[str, Any], reason: str) -> None:
    assert leaving_reason({"metadata": {"name": "n"}, "spec": spec}) == reason


def a_node(name: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {"taints": [], **spec}}


def test_deleted_node_is_leaving_while_it_has_pods() -> None:
    cache = PipelineCache()
    metadata = {"name": "p", "namespace": "team", "uid": "1", "labels": {"trimtab.dev/pipeline": "sample"}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"nodeName": "n"}}
    cache.objects.put(pod)

    assert cache.put_node(a_node("n")) == set()
    assert cache.put_node(a_node("n", unschedulable=True)) == {("team", "sample")}
    assert cache.put_node(a_node("n"), deleted=True) == {("team", "sample")}
    cache.set_nodes([a_node("other", unschedulable=True)])
    assert cache.leaving == {"other": "cordoned", "n": "deleted"}
    cache.objects.remove(pod)
    cache.set_nodes([a_node("other")])
    assert cache.leaving == {}


class Nodes:
    """Two nodes of the API server; pods are assigned to the one that is not cordoned."""

    def __init__(self, cluster: Cluster, machinery: Machinery, names: tuple[str, str]) -> None:
        self._cluster, self._machinery, self.names = cluster, machinery, names
        machinery.node = names[0]

    async def cordon(self, name: str) -> None:
        self._machinery.node = next(other for other in self.names if other != name)
        for each in self.names:
            await self._cluster.apply(a_node(each, unschedulable=each == name), manager="tests")

    async def uncordon(self) -> None:
        for each in self.names:
            await self._cluster.apply(a_node(each, unschedulable=False), manager="tests")


@pytest.fixture
async def scene(cluster: Cluster, namespace: str) -> AsyncIterator[tuple[Site, Nodes]]:
    """A served pipeline of one stage with two replicas and one router, on the first node."""
    budget = {"cores": "4", "surgeCores": "2"}
    site = Site(cluster, namespace, a_pipeline_document(budget=budget), settings=replace(SETTINGS, watches_nodes=True))
    nodes = Nodes(cluster, site.machinery, (f"{namespace}-a", f"{namespace}-b"))
    await nodes.uncordon()
    await nodes.uncordon()  # the API server taints new nodes as not ready
    await site.apply_profiled()
    await site.apply_plan(1, replicas=2)
    await site.settle()
    yield site, nodes
    for name in nodes.names:
        await cluster.delete("Node", None, name)


async def pods(site: Site) -> dict[str, str]:
    """Nodes of living pods, by name."""
    found = (await site.cluster.list("Pod", site.namespace)).items
    return {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in found if is_living(pod)}


def is_living(pod: dict[str, Any]) -> bool:
    return "deletionTimestamp" not in pod["metadata"]


async def test_pods_of_a_cordoned_node_get_successors_first(scene: tuple[Site, Nodes]) -> None:
    site, nodes = scene
    before = await pods(site)
    await nodes.cordon(nodes.names[0])
    await site.look()
    marked = await site.get("Pod", next(iter(before)))

    assert len(before) == 3
    assert marked["metadata"]["annotations"][DELETION_COST] == "-1"
    assert sum((await site.replicas()).values()) == 4
    assert [reason for reason, _ in await site.events()].count("NodeLeaving") == 3
    await site.machinery.step()
    assert before.items() <= (await pods(site)).items()

    await site.settle()
    after = await pods(site)
    assert sorted(after.values()) == [nodes.names[1]] * 3
    assert sum((await site.replicas()).values()) == 2
    assert (await site.conditions())["Ready"] == ("True", "Ready")
    assert [reason for reason, _ in await site.events()].count("NodeLeaving") == 3


class TogetherCluster:
    """A cluster that answers patches of pods once so many of them were sent."""

    def __init__(self, cluster: Cluster, patches: int) -> None:
        self._cluster, self._sent = cluster, asyncio.Barrier(patches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    async def apply(self, body: dict[str, Any], **options: Any) -> dict[str, Any]:
        if body["kind"] == "Pod":
            await self._sent.wait()
        return await self._cluster.apply(body, **options)


async def test_pods_of_a_leaving_node_are_marked_together(scene: tuple[Site, Nodes]) -> None:
    site, nodes = scene
    before = await pods(site)
    site.restart(TogetherCluster(site.cluster, len(before)))
    await nodes.cordon(nodes.names[0])
    async with asyncio.timeout(60):
        await site.look()
    marked = [await site.get("Pod", name) for name in before]

    assert [pod["metadata"]["annotations"][DELETION_COST] for pod in marked] == ["-1"] * 3


async def test_change_of_a_node_enqueues_pipelines_on_it(scene: tuple[Site, Nodes]) -> None:
    site, nodes = scene
    controller, seen = site.controller, asyncio.Event()

    async def handle(key: Key) -> None:
        if key == (site.namespace, site.name) and controller.store.leaving == {nodes.names[0]: "cordoned"}:
            seen.set()

    tasks = [asyncio.create_task(each) for each in (controller.watch(), controller.queue.work(handle))]
    await nodes.cordon(nodes.names[0])
    async with asyncio.timeout(60):
        await seen.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_pods_stay_if_their_node_does(scene: tuple[Site, Nodes]) -> None:
    site, nodes = scene
    before = await pods(site)
    await nodes.cordon(nodes.names[0])
    await site.look()
    await nodes.uncordon()
    await site.settle()

    assert await pods(site) == before
    assert sum((await site.replicas()).values()) == 2
    for name in before:
        assert (await site.get("Pod", name))["metadata"]["annotations"][DELETION_COST] == "0"


async def test_replicas_without_room_for_successors_stay(scene: tuple[Site, Nodes]) -> None:
    site, nodes = scene
    site.document["spec"]["budget"] = {"cores": "2"}
    await site.apply_pipeline()
    await site.settle()
    before = await pods(site)
    await nodes.cordon(nodes.names[0])
    await site.settle()

    assert {name: node for name, node in (await pods(site)).items() if "router" not in name} == {
        name: node for name, node in before.items() if "router" not in name
    }
    assert (await site.conditions())["Ready"] == ("True", "Ready")
