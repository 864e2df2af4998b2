"""Cluster watcher: endpoints read from EndpointSlices, and plans and replicas of a real API server."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests import builders
from tests.builders import a_plan, a_stage, a_variant
from tests.processes import own_address
from tests.router.engines import MODEL, an_engine_pipeline
from tests.router.fakes import FakeReplica, a_pipeline, a_request, a_rig, until
from tests.router.test_changes import two_variants
from tests.tcp_relay import before_the_api_server
from trimtab_kubernetes import Cluster
from trimtab_kubernetes.objects import Object
from trimtab_pipelines.documents import load_endpoints
from trimtab_pipelines.endpoints import Endpoint
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.spec import InferencePipeline
from trimtab_router.router import Router
from trimtab_router.watchers.cluster_watcher import ClusterWatcher
from trimtab_router.watchers.endpoint_slices import ready_endpoints

CONTAINER = {"family": "", "storageUri": "", "container": {"image": "someone/else:1", "port": 8000, "modelName": "m"}}
PIPELINE = builders.a_pipeline(
    [
        a_stage("first", variants=[a_variant("small"), a_variant("large", accuracy=0.95)]),
        a_stage("second", "first.outputs.y", variants=[a_variant("theirs", **CONTAINER)]),
    ]
)


def a_slice(
    *endpoints: dict[str, Any],
    name: str = "sample-first-abc",
    stage: str = "first",
    variants: tuple[str, ...] = ("small", "large"),
    port: int = 9000,
    kind: str = "IPv4",
) -> dict[str, Any]:
    labels = {"trimtab.dev/pipeline": "sample", "trimtab.dev/stage": stage}
    labels |= {f"variant.trimtab.dev/{variant}": "true" for variant in variants}
    return {
        "metadata": {"name": name, "labels": labels},
        "addressType": kind,
        "endpoints": list(endpoints),
        "ports": [{"name": "data", "port": port, "protocol": "TCP"}],
    }


def a_pod(name: str = "pod-0", address: str = "10.0.0.1", **conditions: bool) -> dict[str, Any]:
    said = {"ready": True, "serving": True, "terminating": False} | conditions
    return {"addresses": [address], "conditions": said, "targetRef": {"kind": "Pod", "name": name}}


TERMINATING = {"ready": False, "serving": True, "terminating": True}


def first(*slices: dict[str, Any], proven: frozenset[str] = frozenset()) -> list[tuple[str, str, bool]]:
    found = ready_endpoints(slices, PIPELINE, proven).stages["first"]
    return [(endpoint.name, endpoint.address, endpoint.draining) for endpoint in found]


def test_pods_of_all_services_of_a_stage():
    assert first(
        a_slice(a_pod("b", "10.0.0.2"), a_pod("a", "10.0.0.1"), variants=("small",)),
        a_slice(a_pod("c", "10.0.0.3"), name="sample-first-xyz", variants=("large",)),
    ) == [("a", "10.0.0.1:9000", False), ("b", "10.0.0.2:9000", False), ("c", "10.0.0.3:9000", False)]


def test_the_labels_say_which_variants():
    found = ready_endpoints([a_slice(a_pod(), variants=("large", "forgotten"))], PIPELINE)

    assert found.stages["first"][0].variants == ("large",)
    assert found.stages["second"] == ()


def test_a_container_keeps_its_own_names_and_port():
    found = ready_endpoints([a_slice(a_pod(), stage="second", variants=("theirs",), port=8000)], PIPELINE)

    assert found.stages["second"] == (
        Endpoint(name="pod-0", address="10.0.0.1:8000", variants=("theirs",), model_names={"theirs": "m"}),
    )


def test_openai_container_is_probed_at_its_ready_path():
    found = ready_endpoints([a_slice(a_pod(), stage="text", variants=("small",), port=8000)], an_engine_pipeline())

    (endpoint,) = found.stages["text"]
    assert (endpoint.protocol, endpoint.ready_path, endpoint.model_names) == ("OpenAI", "/health", {"small": MODEL})


def test_a_pod_joins_once_it_is_ready():
    assert first(a_slice(a_pod(ready=False, serving=False))) == []


def test_a_pod_that_was_ready_stays_until_it_ends():
    found = first(a_slice(a_pod(ready=False, serving=False)), proven=frozenset({"pod-0"}))
    assert found == [("pod-0", "10.0.0.1:9000", False)]


def test_terminating_pod_drains_unless_it_is_the_last():
    leaving = a_pod("leaving", "10.0.0.1", **TERMINATING)

    assert first(a_slice(leaving, a_pod("staying", "10.0.0.2"))) == [
        ("leaving", "10.0.0.1:9000", True),
        ("staying", "10.0.0.2:9000", False),
    ]
    starting = a_pod("starting", "10.0.0.2", ready=False, serving=False)
    assert first(a_slice(leaving, starting)) == [("leaving", "10.0.0.1:9000", False)]


def test_a_pod_in_two_slices_is_one():
    old = a_slice(a_pod(ready=False, serving=False), name="a")
    new = a_slice(a_pod(), name="b")

    assert first(old, new) == first(new, old) == [("pod-0", "10.0.0.1:9000", False)]


@pytest.mark.parametrize(
    "found",
    [
        a_slice(a_pod(), stage="unknown"),
        a_slice(a_pod(), variants=("unknown",)),
        {"metadata": {"name": "bare"}, "endpoints": [a_pod()], "ports": [{"port": 1}]},
        a_slice() | {"endpoints": None, "ports": None},
        a_slice({"addresses": [], "conditions": {}}),
    ],
)
def test_what_is_not_ours_is_passed_over(found):
    assert first(found) == []


def test_what_is_left_out_has_its_meaning():
    bare = {"addresses": ["fd00::1"], "conditions": {}}
    found = a_slice(bare, kind="IPv6") | {"ports": []}

    assert first(found) == [("fd00::1", "[fd00::1]:9000", False)]


def as_object(plan: PipelinePlan, namespace: str, **metadata: Any) -> Object:
    written: Object = plan.model_dump(mode="json", by_alias=True, exclude_none=True)
    return written | {"metadata": {"name": plan.metadata.name, "namespace": namespace} | metadata}


def slice_object(namespace: str, *pods: dict[str, Any], name: str = "sample-first", port: int = 9000) -> Object:
    described = a_slice(*pods, name=name, stage="stage-0", variants=("small",), port=port)
    labels = described["metadata"]["labels"] | {"kubernetes.io/service-name": name}
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", **described, "metadata": metadata}


@contextlib.asynccontextmanager
async def following(
    router: Router, cluster: Cluster, namespace: str, stored: Path | None = None
) -> AsyncIterator[None]:
    task = asyncio.create_task(ClusterWatcher(router, cluster, namespace, stored).watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def followed(cluster: Cluster, namespace: str) -> AsyncIterator[tuple[Router, InferencePipeline]]:
    pipeline = two_variants()
    router = Router(pipeline)
    async with following(router, cluster, namespace):
        yield router, pipeline
    await router.drain(1.0)


def broken_plans(router: Router) -> float:
    labels = {"namespace": "default", "pipeline": "sample", "file": "PipelinePlan"}
    return router.metrics.registry.get_sample_value("trimtab_invalid_config_total", labels) or 0.0


async def test_plans_are_followed_and_broken_ones_change_nothing(followed, cluster: Cluster, namespace: str):
    router, pipeline = followed
    await cluster.apply(as_object(a_plan(pipeline, 3, batchSize=5), namespace), manager="adapter")
    await until(lambda: router.plan_generation == 3)
    assert router.state().plan_applied_at == pytest.approx(time.time(), abs=5)

    await cluster.apply(as_object(a_plan(pipeline, 4, variant="huge"), namespace), manager="adapter")
    await until(lambda: broken_plans(router) == 1)
    assert router.plan_generation == 3

    other = as_object(a_plan(pipeline, 9), namespace, name="sample-advisory", labels={"trimtab.dev/advisory": "true"})
    await cluster.apply(other, manager="adapter")
    await cluster.delete("PipelinePlan", namespace, "sample")
    await cluster.apply(as_object(a_plan(pipeline, 2, batchSize=7), namespace), manager="user")
    await until(lambda: router.plan_generation == 2)
    assert router.state().stages["stage-0"].batch_size == 7


async def test_plan_that_the_operator_rejects_is_taken_back(followed, cluster: Cluster, namespace: str):
    """It alone knows the current budget."""
    router, pipeline = followed
    await cluster.apply(as_object(a_plan(pipeline, 3), namespace), manager="adapter")
    await until(lambda: router.plan_generation == 3)
    written = await cluster.apply(as_object(a_plan(pipeline, 4, replicas=900), namespace), manager="mallory")
    await until(lambda: router.plan_generation == 4)

    generation = written["metadata"]["generation"]
    verdict = {
        "type": "Applied",
        "status": "False",
        "reason": "PlanRejected",
        "message": "spec.stages: the plan requests 900 cores",
        "lastTransitionTime": "2030-01-01T00:00:00Z",
        "observedGeneration": generation,
    }
    status: Object = {name: written[name] for name in ("apiVersion", "kind")}
    status["metadata"] = {"name": "sample", "namespace": namespace}
    status["status"] = {"observedGeneration": generation, "conditions": [verdict]}
    await cluster.apply(status, manager="trimtab-operator", subresource="status")
    await until(lambda: router.plan_generation == 3)
    assert broken_plans(router) >= 1


async def test_replicas_come_drain_and_go(followed, cluster: Cluster, namespace: str):
    router, _ = followed

    def replicas() -> set[str]:
        return set(router.state().stages["stage-0"].endpoints)

    starting = a_pod("two", "10.9.0.2", ready=False, serving=False)
    await cluster.apply(slice_object(namespace, a_pod("one", "10.9.0.1"), starting), manager="cluster")
    await until(lambda: replicas() == {"one"})
    await cluster.apply(slice_object(namespace, a_pod("three", "10.9.0.3"), name="sample-other"), manager="cluster")
    await until(lambda: replicas() == {"one", "three"})
    await cluster.apply(slice_object(namespace, a_pod("two", "10.9.0.2")), manager="cluster")
    await until(lambda: replicas() == {"two", "three"})
    await cluster.delete("EndpointSlice", namespace, "sample-other")
    await until(lambda: replicas() == {"two"})


def stored_names(file: Path) -> list[str]:
    """Replicas in the file of the last endpoints, which is written a little later than they are used."""
    return [one.name for one in load_endpoints(file).stages["stage-0"]] if file.exists() else []


async def test_unavailable_api_server_does_not_disturb_requests(
    cluster: Cluster, namespace: str, kubeconfig: Path, tmp_path: Path
):
    host, pipeline, stored = own_address(), a_pipeline(1), tmp_path / "endpoints.json"
    replica = FakeReplica(host=host, name="one")
    async with (
        before_the_api_server(kubeconfig, tmp_path) as (relay, through),
        a_rig(pipeline, {"stage-0": [replica]}) as rig,
        await Cluster.connect(str(through)) as api,
        following(rig.router, api, namespace, stored),
    ):
        assert (await rig.rest(a_request()))[0] == 200

        pod = a_pod("one", host)
        await cluster.apply(slice_object(namespace, pod, port=replica.port), manager="cluster")
        await cluster.apply(as_object(a_plan(pipeline, 5), namespace), manager="adapter")
        await relay.open()
        await rig.until(lambda: rig.router.plan_generation == 5)
        assert (await rig.rest(a_request()))[0] == 200

        await relay.close()
        other = a_pod("other", "10.9.0.9")
        await cluster.apply(slice_object(namespace, pod, other, port=replica.port), manager="cluster")
        await cluster.apply(as_object(a_plan(pipeline, 6), namespace), manager="adapter")
        assert (await rig.rest(a_request()))[0] == 200
        await relay.open()
        await rig.until(lambda: "other" in rig.router.state().stages["stage-0"].endpoints)
        await rig.until(lambda: stored_names(stored) == ["one", "other"])
        await rig.until(lambda: rig.router.plan_generation == 6)
        assert (await rig.rest(a_request()))[0] == 200
    assert await rig.outcomes() == {"ok": 4}
