"""Stages that appear or go: encoders run, and renamed stages serve, until their successors are ready."""

from typing import Any

import pytest

from tests.builders import a_body, a_pipeline, a_pipeline_document, a_stage
from tests.operator_.conftest import SETTINGS, Site, owned
from tests.router.disaggregated import PULLS, WHOLE, a_choosing_pipeline, laid_out
from trimtab_kubernetes import Cluster, Rejected
from trimtab_operator.manifests.objects import Ref
from trimtab_operator.manifests.routers import router_objects
from trimtab_operator.reconciliation.conditions import StageProgress, route_ready, stages_ready
from trimtab_operator.reconciliation.observed_state import PodState
from trimtab_operator.reconciliation.replica_rollout import ClusterSite, has_new_routes
from trimtab_pipelines.kubernetes_names import ADAPTER_MANAGER, STAGE_LABEL
from trimtab_pipelines.rollout import Capacity


def a_document() -> dict[str, Any]:
    document = a_body(a_choosing_pipeline())
    document["spec"]["stages"][1]["variantPlacement"] = "Dedicated"
    return document


async def publish(site: Site, *, apart: bool, generation: int) -> None:
    written = a_body(laid_out(site.pipeline, apart=apart, generation=generation), namespace=site.namespace)
    written["spec"]["explanation"] = {"change": f"why plan {generation}", "placement": "one of two"}
    await site.cluster.apply(written, manager=ADAPTER_MANAGER)


@pytest.fixture
async def site(cluster: Cluster, namespace: str) -> Site:
    made = Site(cluster, namespace, a_document())
    await made.apply_profiled()
    await publish(made, apart=False, generation=1)
    await made.settle()
    return made


async def test_stage_without_replicas_is_ready(site) -> None:
    assert await site.replicas() == {"small": 0, WHOLE: 1}
    assert (await site.conditions())["StagesReady"] == ("True", "AllReady")
    assert (await site.conditions())["RouteReady"] == ("True", "RouterReady")
    assert await site.good_plan() == 1


async def test_encoders_run_until_colocated_replicas_are_ready(site) -> None:
    await publish(site, apart=True, generation=2)
    await site.settle()
    assert await site.replicas() == {"small": 1, PULLS: 1, WHOLE: 0}

    await publish(site, apart=False, generation=3)
    await site.look()
    assert await site.replicas() == {"small": 1, PULLS: 1, WHOLE: 1}
    await site.settle()
    assert await site.replicas() == {"small": 0, PULLS: 0, WHOLE: 1}


async def test_colocated_encoder_requires_references(cluster, namespace) -> None:
    document = a_document()
    text = document["spec"]["stages"][1]
    text["inputs"] = [each for each in text["inputs"] if each["name"] != "references"]
    document["metadata"]["namespace"] = namespace
    with pytest.raises(Rejected, match="encoder Colocated requires role Generate"):
        await cluster.apply(document, manager="user")


def test_unplanned_replicas_are_not_reported_missing() -> None:
    idle = StageProgress("encode", wanted=0, ready=0, serving=0)
    served, gone = StageProgress("text", 1, 1, 1), StageProgress("text", 1, 0, 0)

    assert stages_ready([idle, served]).status == "True"
    assert route_ready([], 1, [idle, served]).status == "True"
    assert stages_ready([idle, gone]).message == "no ready replica in: text"


async def test_renamed_stage_serves_until_its_successor_is_ready(cluster: Cluster, namespace: str) -> None:
    scene = Site(cluster, namespace, a_pipeline_document([a_stage("locate"), a_stage("read", "locate.outputs.y")]))
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


async def a_router_of_before(scene: Site) -> dict[str, Any]:
    deployment = await scene.get("Deployment", "sample-router")
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
