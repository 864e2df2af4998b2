"""Replicas of resource flavors: their nodes and devices, their limits, and the time that they may wait for a node."""

from dataclasses import replace
from typing import Any

import pytest

from tests.builders import a_pipeline, a_pipeline_document, a_plan, a_stage, a_variant
from tests.operator_.conftest import SETTINGS, Site, owned
from trimtab_kubernetes import Cluster
from trimtab_operator.manifests.objects import Ref
from trimtab_operator.manifests.routers import pipeline_hash, router_pipeline
from trimtab_operator.reconcile import reconcile
from trimtab_operator.reconciliation.observed_state import ObservedState, PodState, Problem, pod_states
from trimtab_operator.reconciliation.plan_history import PlanHistory, rollout_targets
from trimtab_operator.reconciliation.plan_selection import select_plan
from trimtab_operator.reconciliation.replica_rollout import ClusterSite, decide_replicas
from trimtab_pipelines.flavors import ResourceFlavor
from trimtab_pipelines.rollout import Capacity
from trimtab_pipelines.spec import InferencePipeline

CREATED = "2026-01-01T00:00:00Z"
TAINT = {"key": "gpu", "operator": "Exists"}
FLAVOR = {
    "name": "mig",
    "device": "nvidia.com/mig-1g.10gb",
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [TAINT],
    "limit": 2,
    "nodeStartup": "90s",
}


LARGE = a_variant("large", flavor="mig", resources={"cpu": 1, "gpu": 1}, nodeSelector={"zone": "a"})
BUDGET = {"cores": "8", "gpus": 8, "costPerHour": "30.5"}


def a_flavored_pipeline(**flavor: Any) -> InferencePipeline:
    return owned(a_pipeline([a_stage(variants=[LARGE])], budget=BUDGET, flavors=[FLAVOR | flavor]))


def deployment_of(pipeline: InferencePipeline) -> Any:
    site = ClusterSite(pipeline, {}, (), SETTINGS)
    written = decide_replicas(site, a_plan(pipeline), Capacity(8.0, 8)).objects
    return next(each for each in written if each["kind"] == "Deployment")


def test_replica_requests_its_flavors_nodes_and_devices() -> None:
    deployment = deployment_of(a_flavored_pipeline())
    pod = deployment["spec"]["template"]
    requested = pod["spec"]["containers"][0]["resources"]

    assert pod["metadata"]["labels"]["trimtab.dev/flavor"] == "mig"
    assert pod["spec"]["nodeSelector"] == {"gpu": "h100", "zone": "a"}
    assert pod["spec"]["tolerations"] == [TAINT]
    assert requested["requests"]["nvidia.com/mig-1g.10gb"] == requested["limits"]["nvidia.com/mig-1g.10gb"] == "1"
    pod = {**pod, "metadata": pod["metadata"] | {"name": "p", "creationTimestamp": CREATED}}
    assert pod_states([pod])[0].requests == Capacity(1.0, 1, {"mig": 1})


def test_rollout_keeps_the_limit_of_a_flavor() -> None:
    pipeline = a_flavored_pipeline()
    plan = a_plan(pipeline)
    selection = select_plan(ClusterSite(pipeline, {}, (), SETTINGS), PlanHistory(plan), 0.0)
    (target,) = rollout_targets(plan, pipeline)

    assert selection.limit == Capacity(8.0, 8, {"mig": 2})
    assert selection.limit.fits(target.per_replica.times(2))
    assert not selection.limit.fits(target.per_replica.times(3))


@pytest.mark.parametrize(("startup", "given_up"), [("90s", False), ("35s", False), ("25s", True)])
def test_pod_waits_as_long_as_its_node_takes(startup: str, *, given_up: bool) -> None:
    pipeline = a_flavored_pipeline(nodeStartup=startup)
    problem = Problem("Unschedulable", "no node")
    requests = Capacity(1.0, 1, {"mig": 1})
    pod = PodState("p", "model-server", "first", "large", False, False, False, 0.0, requests, problem)
    selection = select_plan(ClusterSite(pipeline, {}, (pod,), SETTINGS), PlanHistory(a_plan(pipeline)), 60.0)

    assert (selection.schedulable is not None) is given_up


@pytest.mark.parametrize(
    ("group", "now", "given_up"), [("large", 279.0, False), ("large", 281.0, True), ("other", 200.0, True)]
)
def test_pods_wait_anew_once_one_of_their_group_got_a_node(group: str, now: float, *, given_up: bool) -> None:
    pipeline = a_flavored_pipeline()
    problem, requests = Problem("Unschedulable", "no node"), Capacity(1.0, 1, {"mig": 1})
    waits = PodState("p", "model-server", "first", "large", False, False, False, 0.0, requests, problem)
    newer = replace(waits, name="q", replica_group=group, scheduled=True, problem=None, scheduled_at=100.0)
    selection = select_plan(ClusterSite(pipeline, {}, (waits, newer), SETTINGS), PlanHistory(a_plan(pipeline)), now)

    assert (selection.schedulable is not None) is given_up


@pytest.mark.parametrize("gated", [True, False])
def test_gated_pod_is_on_its_way_however_long_it_takes(*, gated: bool) -> None:
    pipeline = a_flavored_pipeline()
    gates = [{"name": "kueue.x-k8s.io/admission"}] if gated else []
    template = deployment_of(pipeline)["spec"]["template"]
    metadata = template["metadata"] | {"name": "p", "creationTimestamp": CREATED}
    pods = pod_states([{"metadata": metadata, "spec": template["spec"] | {"schedulingGates": gates}}])
    selection = select_plan(ClusterSite(pipeline, {}, pods, SETTINGS), PlanHistory(a_plan(pipeline)), 1_800_000_000.0)

    assert (selection.failure is None) is gated
    assert selection.schedulable is None


def test_replicas_wait_in_the_queue_of_their_pipeline() -> None:
    pipeline = a_flavored_pipeline()
    labels = {"kueue.x-k8s.io/queue-name": "team", "other": "label"}
    queued = pipeline.with_metadata(labels=labels)
    added = deployment_of(queued)["metadata"]["labels"].items() - deployment_of(pipeline)["metadata"]["labels"].items()

    assert dict(added) == {"kueue.x-k8s.io/queue-name": "team"}


@pytest.mark.parametrize(("health", "terminating"), [("Unhealthy", False), ("Unhealthy", True), ("Healthy", False)])
def test_replica_with_an_unhealthy_device_is_replaced(health: str, *, terminating: bool) -> None:
    pipeline = a_flavored_pipeline()
    times = {"deletionTimestamp": CREATED} if terminating else {}
    template = deployment_of(pipeline)["spec"]["template"]
    device = {"name": FLAVOR["device"], "resources": [{"resourceID": "mig-0", "health": health}]}
    pod = {
        "metadata": template["metadata"] | {"name": "p", "creationTimestamp": CREATED, **times},
        "spec": template["spec"],
        "status": {"containerStatuses": [{"name": "own", "allocatedResourcesStatus": [device]}]},
    }
    document = pipeline.model_dump(mode="json", by_alias=True, exclude_none=True)
    decided = reconcile(ObservedState(document, pods=[pod]), SETTINGS, 0.0)
    replaced = health == "Unhealthy" and not terminating

    assert decided.delete == ((Ref("Pod", "p"),) if replaced else ())
    assert [event["reason"] for event in decided.events].count("DeviceUnhealthy") == int(replaced)


def test_prices_do_not_restart_routers() -> None:
    cheap, dear = (a_flavored_pipeline(prices={"device": price}) for price in (1, 2))

    assert pipeline_hash(cheap, SETTINGS) == pipeline_hash(dear, SETTINGS)
    assert router_pipeline(cheap).spec == router_pipeline(dear).spec


async def test_flavors_of_the_cluster_serve_a_pipeline(cluster: Cluster, namespace: str) -> None:
    document = a_pipeline_document([a_stage(variants=[LARGE])], budget=BUDGET)
    settings = replace(SETTINGS, flavors=(ResourceFlavor.model_validate(FLAVOR),))
    scene = Site(cluster, namespace, document, settings=settings)
    await scene.serve()

    assert (await scene.conditions())["PlanApplied"] == ("True", "Applied")
    assert await scene.replicas("trimtab.dev/flavor") == {"mig": 1}
    assert (await scene.status())["devices"] == "1 mig"
    scene.settings = SETTINGS
    scene.restart()
    await scene.look()
    assert (await scene.conditions())["Ready"] == ("False", "InvalidSpec")
    assert "variant large: there is no resource flavor 'mig'" in await scene.message("Ready")
    assert await scene.replicas() == {"large": 1}
