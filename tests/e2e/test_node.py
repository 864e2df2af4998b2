"""Test node: starts from leftovers of earlier runs, runs pods, and leaves nothing."""

import asyncio
import os
import signal
from typing import Any

import httpx
import pytest

from tests.e2e import node
from trimtab_kubernetes import Cluster

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def a_pod(namespace: str, name: str, container: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": name,
                    "imagePullPolicy": "Never",
                    "securityContext": RESTRICTED,
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                    **container,
                }
            ],
            "volumes": [{"name": "data", "emptyDir": {}}],
        },
    }


async def ready(cluster: Cluster, namespace: str, name: str) -> dict[str, Any]:
    """Wait until a pod is ready and return it."""
    async with asyncio.timeout(60):
        while True:
            listing = await cluster.list("Pod", namespace)
            pod = next(item for item in listing.items if item["metadata"]["name"] == name)
            conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", [])}
            if conditions.get("Ready") == "True":
                return pod
            async for _ in cluster.watch("Pod", namespace, None, listing.resource_version):
                break


def kill(*names: str) -> None:
    for name in names:
        os.kill(int((node.STATE / "run" / f"{name}.pid").read_text()), signal.SIGKILL)


@pytest.fixture
def own_node() -> None:
    """A node that this test may break."""
    if node.given() is not None:
        pytest.skip("KUBECONFIG names an external cluster, which tests must not break")
    if node.running():
        pytest.skip("the node was running before the tests and may be in use")
    node.require_node()


@pytest.mark.slow
async def test_starts_from_leftovers_and_leaves_nothing(own_node):
    try:
        kubeconfig = node.script("up")
        async with await Cluster.connect(kubeconfig) as cluster:
            await cluster.create(a_pod("default", "left", {"image": "localhost/pause:dev"}), manager="tests")
            await ready(cluster, "default", "left")
        kill("kube-apiserver", "containerd", "kubelet")  # the pod, its mounts and its network outlive them
        assert any("pause" in words for words in node.processes())

        node.script("up")
        async with await Cluster.connect(kubeconfig) as cluster:
            assert not (await cluster.list("Pod", "default")).items
        assert not any(words.startswith("/pause") for words in node.processes())
    finally:
        node.script("down")
    assert node.leftovers() == []


@pytest.mark.slow
def test_reused_pid_is_not_killed(own_node):
    run = node.STATE / "run"
    run.mkdir(parents=True, exist_ok=True)
    (run / "kubelet.pid").write_text(f"{os.getpid()}\n")
    node.script("down")  # would end this test run
    assert not (run / "kubelet.pid").exists()


@pytest.mark.slow
async def test_restricted_namespace_runs_minio(node_cluster: Cluster, restricted_namespace: str):
    if node.given() is None:
        node.script("images", "minio")
    container = {
        "image": "localhost/minio:dev",
        "env": [{"name": "HOME", "value": "/data"}],
        "readinessProbe": {"httpGet": {"path": "/minio/health/ready", "port": 9000}, "periodSeconds": 1},
    }
    await node_cluster.create(a_pod(restricted_namespace, "minio", container), manager="tests")
    pod = await ready(node_cluster, restricted_namespace, "minio")
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://{pod['status']['podIP']}:9000/bucket")
    assert answer.status_code == 403
    assert "AccessDenied" in answer.text
