"""Test node: starts from leftovers of earlier runs, and leaves nothing."""

import asyncio
import os
import signal

import pytest

from tests.e2e import node
from tests.e2e.observed import is_ready
from trimtab_kubernetes import Cluster

PAUSE = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "left", "namespace": "default"},
    "spec": {
        "terminationGracePeriodSeconds": 1,
        "containers": [
            {
                "name": "left",
                "image": "localhost/pause:dev",
                "imagePullPolicy": "Never",
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
            }
        ],
        "volumes": [{"name": "data", "emptyDir": {}}],
    },
}


async def wait_until_ready(cluster: Cluster) -> None:
    async with asyncio.timeout(60):
        while True:
            listing = await cluster.list("Pod", "default")
            pod = next(item for item in listing.items if item["metadata"]["name"] == "left")
            if is_ready(pod):
                return
            async for _ in cluster.watch("Pod", "default", None, listing.resource_version):
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
            await cluster.create(PAUSE, manager="tests")
            await wait_until_ready(cluster)
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
