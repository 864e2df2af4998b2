"""Operator process: leader election between two replicas, and takeover of unfinished work."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.builders import a_pipeline_document
from tests.operator_.conftest import Site
from tests.processes import held_port
from tests.tcp_relay import before_the_api_server
from trimtab_kubernetes import Cluster
from trimtab_kubernetes.watch import list_and_watch
from trimtab_pipelines.kubernetes_names import replica_group_name


@asynccontextmanager
async def an_operator(kubeconfig: Path, namespace: str, name: str) -> AsyncIterator[tuple[Any, int]]:
    """Run an operator of one namespace; yield its process and the port it answers probes at."""
    with held_port() as port, held_port() as metrics:
        environment = {
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            "POD_NAME": name,
            "POD_NAMESPACE": namespace,
            "TRIMTAB_NAMESPACES": namespace,
            "TRIMTAB_HEALTH_PORT": str(port),
            "TRIMTAB_METRICS_PORT": str(metrics),
        }
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "trimtab_operator", env=environment)
        try:
            yield process, port
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def until(cluster: Cluster, kind: str, namespace: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async with asyncio.timeout(120):
        async for change in list_and_watch(cluster, kind, namespace):
            if change.object is not None and not change.deleted and holds(change.object):
                return change.object
    raise AssertionError("a watch never ends by itself")


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_only_the_leader_of_two_replicas_writes(kubeconfig: Path, cluster: Cluster, namespace: str) -> None:
    """The second waits; when the first is killed it takes over, and puts right what happened in between."""
    site = Site(cluster, namespace, a_pipeline_document())
    name = replica_group_name("sample", "stage-0", "small")
    async with an_operator(kubeconfig, namespace, "one") as (first, port):
        lease = await until(cluster, "Lease", namespace, lambda found: found["spec"]["holderIdentity"] == "one")
        async with an_operator(kubeconfig, namespace, "two"):
            await site.apply_profiled()
            await site.apply_plan()
            made = await until(cluster, "Deployment", namespace, lambda found: found["metadata"]["name"] == name)
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"http://127.0.0.1:{port}/healthz")).status_code == 200
            held = await until(cluster, "Lease", namespace, lambda _: True)
            assert held["spec"]["leaseTransitions"] == 0

            first.send_signal(signal.SIGKILL)
            await first.wait()
            await cluster.delete("Deployment", namespace, name)
            taken = await until(cluster, "Lease", namespace, lambda found: found["spec"]["holderIdentity"] == "two")
            again = await until(cluster, "Deployment", namespace, lambda found: found["metadata"]["name"] == name)

    assert lease["metadata"]["uid"] == taken["metadata"]["uid"]
    assert taken["spec"]["leaseTransitions"] == 1
    assert again["metadata"]["uid"] != made["metadata"]["uid"]
    released = await cluster.get("Lease", namespace, "trimtab-operator")
    assert released is not None
    assert not released["spec"].get("holderIdentity")


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_operator_survives_an_unreachable_api_server(
    kubeconfig: Path, cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    """It starts before the API server, works once that is reachable, and stops even if it cannot release its lease."""
    site, name = Site(cluster, namespace, a_pipeline_document()), replica_group_name("sample", "stage-0", "small")
    await site.apply_profiled()
    async with (
        before_the_api_server(kubeconfig, tmp_path) as (relay, through),
        an_operator(through, namespace, "one") as (process, port),
    ):
        await answered(f"http://127.0.0.1:{port}/healthz")
        await relay.open()
        await until(cluster, "Deployment", namespace, lambda found: found["metadata"]["name"] == "sample-router")
        await relay.close()
        await site.apply_plan()
        await relay.open()
        await until(cluster, "Deployment", namespace, lambda found: found["metadata"]["name"] == name)
        await relay.close()
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def answered(url: str) -> None:
    async with httpx.AsyncClient() as client, asyncio.timeout(60):
        while True:
            try:
                assert (await client.get(url)).status_code == 200
            except httpx.ConnectError:
                await asyncio.sleep(0.05)
            else:
                return
