"""How much room nodes have; and full nodes, as in daily use, where a pod's successor waits until it is gone."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from benchmarks.cluster.observing import is_ready, until
from benchmarks.cluster.setting import SYSTEM, Setting
from trimtab_kubernetes.objects import Object
from trimtab_operator.manifests.pod_spec import resources, security_of_container, security_of_pod
from trimtab_pipelines.quantity import parse_quantity

LEFT_CORES = 0.05  # less than any replica asks for
START_SECONDS = 60.0
FILLER_BYTES = 16 * 2**20


async def free_by_node(setting: Setting, ignored: Callable[[Object], bool] = lambda _: False) -> dict[str, float]:
    """The cores that each node can still give to pods, those ignored not counted."""
    nodes = (await setting.cluster.list("Node")).items
    free = {node["metadata"]["name"]: parse_quantity(node["status"]["allocatable"]["cpu"]) for node in nodes}
    for pod in (await setting.cluster.list("Pod")).items:
        node = pod["spec"].get("nodeName")
        if node not in free or pod["status"].get("phase") in ("Succeeded", "Failed") or ignored(pod):
            continue
        for container in pod["spec"]["containers"]:
            free[node] -= parse_quantity(container.get("resources", {}).get("requests", {}).get("cpu", 0))
    return free


@asynccontextmanager
async def full_nodes(setting: Setting) -> AsyncIterator[None]:
    """Take what is free on every node while the block runs."""
    room = {node: cores - LEFT_CORES for node, cores in (await free_by_node(setting)).items()}
    pods = [_filler(node, cores) for node, cores in room.items() if cores > 0]
    names = [pod["metadata"]["name"] for pod in pods]

    async def running() -> bool:
        found = [await setting.cluster.get("Pod", SYSTEM, name) for name in names]
        return all(pod is not None and is_ready(pod) for pod in found)

    try:
        for pod in pods:
            await setting.apply(pod)
        await until(running, "full nodes", START_SECONDS)
        yield
    finally:
        for name in names:
            await setting.cluster.delete("Pod", SYSTEM, name)


def _filler(node: str, cores: float) -> Object:
    container = {
        "name": "filler",
        "image": "localhost/pause:dev",
        "imagePullPolicy": "Never",
        "resources": resources(cores, FILLER_BYTES),
        "securityContext": security_of_container(),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"filler-{node}"[:63].rstrip("-."), "namespace": SYSTEM},
        "spec": {
            "nodeName": node,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "securityContext": security_of_pod(),
            "containers": [container],
        },
    }
