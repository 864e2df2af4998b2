"""Load on a pipeline in the cluster, from a process of its own, and the load that the nodes' free cores can carry."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from tests.e2e.conftest import NAMESPACE, SYSTEM, Installation
from tests.e2e.observed import is_ready, until
from trimtab.demo_load import DemoLoad, changing_load
from trimtab.local.load_process import LoadOptions, LoadProcess
from trimtab_adapter.planning.decide import PlanningInputs, decide
from trimtab_kubernetes.objects import Object
from trimtab_loadtester.results import Results
from trimtab_operator.manifests.pod_spec import resources, security_of_container, security_of_pod
from trimtab_pipelines.plan import ForecastRecord
from trimtab_pipelines.profile import ModelProfile
from trimtab_pipelines.quantity import parse_quantity
from trimtab_pipelines.spec import InferencePipeline

SPARE_CORES = 0.05
"""Less than any replica requests."""
LOADS_RPS = tuple(float(load) for load in np.geomspace(1.0, 500.0, 40))
ABOVE = 1.5
MIN_RATIO = 8.0
SHARE = 0.5
"""The load's own process and the control plane run on the same cores."""
START_SECONDS = 60.0
FILLER_BYTES = 16 * 2**20


async def free_by_node(
    installation: Installation, is_ignored: Callable[[Object], bool] = lambda _: False
) -> dict[str, float]:
    """Cores that each node can still give to pods; ignored pods count as absent."""
    nodes = (await installation.cluster.list("Node")).items
    free = {node["metadata"]["name"]: parse_quantity(node["status"]["allocatable"]["cpu"]) for node in nodes}
    for pod in (await installation.cluster.list("Pod")).items:
        node = pod["spec"].get("nodeName")
        if node not in free or pod["status"].get("phase") in ("Succeeded", "Failed") or is_ignored(pod):
            continue
        sidecars = [each for each in pod["spec"].get("initContainers", []) if each.get("restartPolicy") == "Always"]
        for container in (*pod["spec"]["containers"], *sidecars):
            free[node] -= parse_quantity(container.get("resources", {}).get("requests", {}).get("cpu", 0))
    return free


async def free_cores(installation: Installation) -> float:
    """Cores that the nodes can give to the model servers of the tests' namespace."""

    def is_model_server(pod: Object) -> bool:
        return pod["metadata"]["namespace"] == NAMESPACE and "router" not in pod["metadata"]["name"]

    return sum((await free_by_node(installation, is_model_server)).values()) - SPARE_CORES


@asynccontextmanager
async def full_nodes(installation: Installation) -> AsyncIterator[None]:
    """Take the free cores of every node while the block runs, so that a pod starts only once another has ended."""
    room = {node: cores - SPARE_CORES for node, cores in (await free_by_node(installation)).items()}
    pods = [pause_pod(node, cores) for node, cores in room.items() if cores > 0]
    names = [pod["metadata"]["name"] for pod in pods]

    async def running() -> bool:
        found = [await installation.cluster.get("Pod", SYSTEM, name) for name in names]
        return all(pod is not None and is_ready(pod) for pod in found)

    try:
        for pod in pods:
            await installation.apply(pod)
        await until(running, "full nodes", START_SECONDS)
        yield
    finally:
        for name in names:
            await installation.cluster.delete("Pod", SYSTEM, name)


def pause_pod(node: str, cores: float) -> Object:
    container = {"name": "filler", "image": "localhost/pause:dev", "resources": resources(cores, FILLER_BYTES)}
    metadata = {"name": f"filler-{node}"[:63].rstrip("-."), "namespace": SYSTEM}
    return restricted_pod(metadata, container, nodeName=node)


def restricted_pod(metadata: Object, container: Object, **spec: object) -> Object:
    """A pod of one container that a restricted namespace admits."""
    container |= {"imagePullPolicy": "Never", "securityContext": security_of_container()}
    spec |= {"terminationGracePeriodSeconds": 0, "automountServiceAccountToken": False}
    spec |= {"securityContext": security_of_pod(), "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def load_within(pipeline: InferencePipeline, profiles: Mapping[str, ModelProfile], cores: float) -> DemoLoad:
    """A range of load in which variants and replicas change if a pipeline has this many cores.

    The heaviest variants carry the lowest load alone. The highest needs more replicas, and so does half as much again.
    """
    budget = pipeline.spec.budget.replace(cores=min(pipeline.spec.budget.cores, cores))
    within = pipeline.with_spec(budget=budget)

    def replicas(load_rps: float) -> int:
        forecast = ForecastRecord(peak_rps=load_rps, source="given")
        plan = decide(within, profiles, PlanningInputs(forecast, 0.0)).spec
        return sum(stage.replicas for stage in plan.stages) if plan.feasible else 0

    load = changing_load(within, profiles, cores)
    calm = replicas(load.low_rps)
    high = next((rps for rps in LOADS_RPS if min(replicas(rps), replicas(ABOVE * rps)) > calm), load.high_rps)
    return DemoLoad(min(load.low_rps, high / MIN_RATIO), max(load.high_rps, high) * SHARE)


async def send(pipeline_file: Path, address: str, options: LoadOptions, begun: asyncio.Event | None = None) -> Results:
    """Send a load and return the result of every request; `begun` is set once the first is sent."""
    folder = Path(tempfile.mkdtemp(prefix="trimtab-load-"))
    sending = await LoadProcess.start(pipeline_file, address, options, folder)
    try:
        async for progress in sending.progress():
            if begun is not None and progress.sent:
                begun.set()
        return await sending.results()
    finally:
        await sending.stop()
        shutil.rmtree(folder, ignore_errors=True)
