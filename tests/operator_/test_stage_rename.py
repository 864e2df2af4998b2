"""Renamed stages: the old stage serves until its successor is ready and no former router is left."""

from typing import Any

import pytest

from tests.builders import a_pipeline, a_pipeline_document, a_stage
from tests.operator_.scene import SETTINGS, owned
from tests.operator_.scene import Site as Scene
from trimtab_kubernetes import Cluster
from trimtab_operator.manifests.objects import Ref
from trimtab_operator.manifests.routers import router_objects
from trimtab_operator.reconciliation.observed_state import PodState
from trimtab_operator.reconciliation.replica_rollout import ClusterSite, has_new_routes
from trimtab_pipelines.kubernetes_names import STAGE_LABEL
from trimtab_pipelines.rollout import Capacity


async def test_renamed_stage_serves_until_its_successor_is_ready(cluster: Cluster, namespace: str) -> None:
    scene = Scene(cluster, namespace, a_pipeline_document([a_stage("locate"), a_stage("read", "locate.outputs.y")]))
    await scene.serve()
    scene.document["spec"]["stages"][1]["name"] = "classify"
    scene.document["spec"]["outputs"][0]["from"] = "classify.outputs.y"
    await scene.apply_profiled()
    await scene.settle()
    assert await scene.replicas(STAGE_LABEL) == {"locate": 1, "read": 1}, "nothing is planned yet"

    await scene.apply_plan(2)
    await scene.look()
    assert await scene.replicas(STAGE_LABEL) == {"locate": 1, "read": 1, "classify": 1}
    scene.machinery.drains = False
    before = await a_router_of_before(scene)
    await scene.settle()
    assert await scene.replicas(STAGE_LABEL) == {"locate": 1, "read": 1, "classify": 1}, "a draining router may need it"
    scene.machinery.drains = True
    await scene.machinery.end(before)
    await scene.settle()
    assert await scene.replicas(STAGE_LABEL) == {"locate": 1, "classify": 1}


async def a_router_of_before(scene: Scene) -> dict[str, Any]:
    """One more pod of the routers than their Deployment asks for."""
    deployment = await scene.cluster.get("Deployment", scene.namespace, "sample-router")
    assert deployment is not None
    template = deployment["spec"]["template"]
    metadata = {"name": "sample-router-z", "namespace": scene.namespace, "labels": template["metadata"]["labels"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"] | {"nodeName": "node"}}
    return await scene.cluster.create(pod, manager="tests")


def a_router_pod(number: int, *, leaving: bool = False) -> PodState:
    return PodState(f"r{number}", "router", "", "", not leaving, leaving, True, 0.0, Capacity(), None)


@pytest.mark.parametrize(
    ("status", "pods", "expected"),
    [
        ({}, 2, True),
        ({"updatedReplicas": 1}, 2, False),
        ({"updatedReplicas": 1, "replicas": 1}, 1, False),
        ({"replicas": 3}, 2, False),
        ({"observedGeneration": 4}, 2, False),
        ({}, 3, False),
    ],
    ids=["rests", "rolls", "lacks one", "has one more", "was not looked at since", "one still drains"],
)
def test_routes_are_new_once_no_former_router_is_left(status: dict[str, int], pods: int, *, expected: bool) -> None:
    site = a_site(status, [a_router_pod(number, leaving=number == 2) for number in range(pods)])

    assert has_new_routes(site) is expected


def test_routers_of_another_version_count_as_former() -> None:
    site = a_site({}, [a_router_pod(0), a_router_pod(1)])
    other = owned(a_pipeline([a_stage("other")], router={"replicas": 2}))

    assert not has_new_routes(ClusterSite(other, site.owned, site.pods, SETTINGS))
    assert not has_new_routes(ClusterSite(site.pipeline, {}, (), SETTINGS)), "nor is there a new one"


def a_site(status: dict[str, int], pods: list[PodState]) -> ClusterSite:
    """Two routers at rest, but for `status`."""
    pipeline = owned(a_pipeline([a_stage()], router={"replicas": 2}))
    objects = router_objects(pipeline, None, SETTINGS, pod_monitor=False)
    deployment = next(each for each in objects if each["kind"] == "Deployment")
    deployment["metadata"]["generation"] = 5
    deployment["status"] = {"observedGeneration": 5, "replicas": 2, "updatedReplicas": 2, **status}
    return ClusterSite(pipeline, {Ref("Deployment", "sample-router"): deployment}, pods, SETTINGS)
