"""Cluster watcher against a real API server: plans, replicas and an unavailable server."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.builders import a_plan
from tests.ports import own_address
from tests.router.fakes import FakeReplica, a_pipeline, a_request, a_rig, until
from tests.router.test_changes import two_variants
from tests.router.test_endpoint_slices import a_pod
from tests.router.test_endpoint_slices import a_slice as endpoint_slice
from tests.tcp_relay import before_the_api_server
from trimtab_kubernetes import Cluster
from trimtab_kubernetes.objects import Object
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.spec import InferencePipeline
from trimtab_router.router import Router
from trimtab_router.watchers.cluster_watcher import ClusterWatcher


def as_object(plan: PipelinePlan, namespace: str, **metadata: Any) -> Object:
    written: Object = plan.model_dump(mode="json", by_alias=True, exclude_none=True)
    return written | {"metadata": {"name": plan.metadata.name, "namespace": namespace} | metadata}


def a_slice(namespace: str, *pods: dict[str, Any], name: str = "sample-first", port: int = 9000) -> Object:
    described = endpoint_slice(*pods, name=name, stage="stage-0", variants=("small",), port=port)
    labels = described["metadata"]["labels"] | {"kubernetes.io/service-name": name}
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", **described, "metadata": metadata}


@contextlib.asynccontextmanager
async def following(router: Router, cluster: Cluster, namespace: str) -> AsyncIterator[None]:
    task = asyncio.create_task(ClusterWatcher(router, cluster, namespace).watch())
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


async def test_replicas_come_drain_and_go(followed, cluster: Cluster, namespace: str):
    router, _ = followed

    def replicas() -> set[str]:
        return set(router.state().stages["stage-0"].endpoints)

    starting = a_pod("two", "10.9.0.2", ready=False, serving=False)
    await cluster.apply(a_slice(namespace, a_pod("one", "10.9.0.1"), starting), manager="cluster")
    await until(lambda: replicas() == {"one"})
    await cluster.apply(a_slice(namespace, a_pod("three", "10.9.0.3"), name="sample-other"), manager="cluster")
    await until(lambda: replicas() == {"one", "three"})
    await cluster.apply(a_slice(namespace, a_pod("two", "10.9.0.2")), manager="cluster")
    await until(lambda: replicas() == {"two", "three"})
    await cluster.delete("EndpointSlice", namespace, "sample-other")
    await until(lambda: replicas() == {"two"})


async def test_unavailable_api_server_does_not_disturb_requests(
    cluster: Cluster, namespace: str, kubeconfig: Path, tmp_path: Path
):
    host, pipeline = own_address(), a_pipeline(1)
    replica = FakeReplica(host=host, name="one")
    async with (
        before_the_api_server(kubeconfig, tmp_path) as (relay, through),
        a_rig(pipeline, {"stage-0": [replica]}) as rig,
        await Cluster.connect(str(through)) as api,
        following(rig.router, api, namespace),
    ):
        assert (await rig.rest(a_request()))[0] == 200

        pod = a_pod("one", host)
        await cluster.apply(a_slice(namespace, pod, port=replica.port), manager="cluster")
        await cluster.apply(as_object(a_plan(pipeline, 5), namespace), manager="adapter")
        await relay.open()
        await rig.until(lambda: rig.router.plan_generation == 5)
        assert (await rig.rest(a_request()))[0] == 200

        await relay.close()
        other = a_pod("other", "10.9.0.9")
        await cluster.apply(a_slice(namespace, pod, other, port=replica.port), manager="cluster")
        await cluster.apply(as_object(a_plan(pipeline, 6), namespace), manager="adapter")
        assert (await rig.rest(a_request()))[0] == 200
        await relay.open()
        await rig.until(lambda: "other" in rig.router.state().stages["stage-0"].endpoints)
        await rig.until(lambda: rig.router.plan_generation == 6)
        assert (await rig.rest(a_request()))[0] == 200
    assert await rig.outcomes() == {"ok": 4}
