"""Faults of a cluster: each breaks one part as it breaks in operation, and returns once everything is as before."""

import asyncio
import copy
import hashlib
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from minio import Minio

from tests.e2e import node
from tests.e2e.conftest import MANAGER, MANIFESTS, NAMESPACE, ROOT, SYSTEM, Installation, pipeline_document, run
from tests.e2e.load import full_nodes
from tests.e2e.observed import ObservedPipeline, is_ready, until
from trimtab_kubernetes.objects import Object
from trimtab_operator.manifests.routers import EDGE as ENVOY_CONTAINER
from trimtab_pipelines.kubernetes_names import router_name
from trimtab_pipelines.resource import API_VERSION

RECOVERY_SECONDS = 180.0
UNKNOWN_VARIANT = "no-such-variant"
STORED, BUCKET, SECRET = "stored", "models", "minio"
WEIGHTS = ROOT / "pipelines" / "digits" / "weights"
ACCESS_KEY, SECRET_KEY = "trimtab", "trimtab-benchmark"  # of manifests/minio.yaml, which lives as long as the run
AWAY_SECONDS = 10.0

Fault = Callable[[ObservedPipeline], Awaitable[None]]


async def delete_model_pod(pipeline: ObservedPipeline) -> None:
    pods = await pipeline.pods()
    victim = next(pod for pod in pods if is_ready(pod))
    await _delete(pipeline.installation, NAMESPACE, victim)
    await _replaced(pipeline.pods, victim, len(pods))
    await until(pipeline.serves, "the router's replicas", RECOVERY_SECONDS)


async def delete_model_pod_on_full_nodes(pipeline: ObservedPipeline) -> None:
    """No node has room for another pod before the deleted one has ended."""
    async with full_nodes(pipeline.installation):
        await delete_model_pod(pipeline)


async def delete_router_pod(pipeline: ObservedPipeline) -> None:
    pods = await pipeline.pods("router")
    await _delete(pipeline.installation, NAMESPACE, pods[0])
    await _replaced(lambda: pipeline.pods("router"), pods[0], len(pods))


async def restart_routers(pipeline: ObservedPipeline) -> None:
    """Replace all routers, as a new release does."""
    name = router_name(pipeline.name)
    await pipeline.installation.kubectl("rollout", "restart", f"deployment/{name}", "-n", NAMESPACE)
    await pipeline.installation.rolled_out(name, NAMESPACE, RECOVERY_SECONDS)


async def kill_envoys(pipeline: ObservedPipeline) -> None:
    """Kill the Envoy of every router's pod at once. The node must be this machine."""
    pods = await pipeline.pods("router")
    for process in [process for pod in pods for process in _processes(pod, "envoy")]:
        os.kill(process, signal.SIGKILL)

    async def back() -> bool:
        now = {pod["metadata"]["uid"]: pod for pod in await pipeline.pods("router")}
        same = [(now.get(pod["metadata"]["uid"]), pod) for pod in pods]
        return all(pod is not None and is_ready(pod) and _envoy_id(pod) != _envoy_id(was) for pod, was in same)

    await until(back, "the Envoys", RECOVERY_SECONDS)


def _envoy_id(pod: Object) -> str:
    containers = pod["status"]["initContainerStatuses"]
    return next(str(each["containerID"]) for each in containers if each["name"] == ENVOY_CONTAINER)


def _processes(pod: Object, program: str) -> list[int]:
    """Processes of this machine that run a program in a pod; control groups are named after pods."""
    uid, found = str(pod["metadata"]["uid"]), []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            is_in_pod = uid in (folder / "cgroup").read_text().replace("_", "-")
            if is_in_pod and (folder / "comm").read_text().strip() == program:
                found.append(int(folder.name))
    assert found, f"no {program} of pod {pod['metadata']['name']} runs on this machine"
    return found


def kill(labels: str) -> Fault:
    """A fault that kills a pod of the system without grace."""

    async def strike(pipeline: ObservedPipeline) -> None:
        async def pods() -> list[Object]:
            return (await pipeline.installation.cluster.list("Pod", SYSTEM, labels)).items

        victim = (await pods())[0]
        await _delete(pipeline.installation, SYSTEM, victim, "--grace-period=0", "--force")
        await _replaced(pods, victim, 1)

    return strike


async def restart_api_server(pipeline: ObservedPipeline) -> None:
    await run(node.SCRIPTS / "restart", "kube-apiserver")
    await until(pipeline.is_ready, "Ready after the API server's restart", RECOVERY_SECONDS)


async def delete_deployment(pipeline: ObservedPipeline) -> None:
    """Delete the Deployment of a stage by hand."""
    cluster, stage = (
        pipeline.installation.cluster,
        (await pipeline.pods())[0]["metadata"]["labels"]["trimtab.dev/stage"],
    )
    labels = f"trimtab.dev/pipeline={pipeline.name},trimtab.dev/stage={stage}"
    deployment = (await cluster.list("Deployment", NAMESPACE, labels)).items[0]
    name = deployment["metadata"]["name"]
    await cluster.delete("Deployment", NAMESPACE, name)

    async def back() -> bool:
        now = await cluster.get("Deployment", NAMESPACE, name) or deployment
        is_new = now["metadata"]["uid"] != deployment["metadata"]["uid"]
        return is_new and bool((now.get("status") or {}).get("readyReplicas"))

    await until(back, f"Deployment {name}", RECOVERY_SECONDS)
    await until(pipeline.serves, "the router's replicas", RECOVERY_SECONDS)


async def break_plan(pipeline: ObservedPipeline) -> None:
    """Write a plan that does not fit the pipeline."""
    await pipeline.write_plan((await pipeline.document())["spec"]["stages"][0]["name"], variant=UNKNOWN_VARIANT)

    async def back() -> bool:
        stages = (await pipeline.plan())["spec"]["stages"]
        return all(stage["variant"] != UNKNOWN_VARIANT for stage in stages) and await pipeline.is_ready()

    await until(back, "a plan that fits", RECOVERY_SECONDS)


async def apply_missing_image(pipeline: ObservedPipeline) -> None:
    """Apply another pipeline whose image does not exist, until its condition says so."""
    installation, name = pipeline.installation, "missing-image"
    spec = copy.deepcopy((await pipeline.document())["spec"]) | {"budget": {"cores": "200m"}}
    del spec["router"]  # its stages need the room of a second router
    resources = {"cpu": "10m", "memory": "64Mi"}
    for stage in spec["stages"]:
        container = {"image": "localhost/no-such-image:dev", "imagePullPolicy": "Never"}
        stage["variants"] = [{"name": "none", "accuracy": 0.5, "container": container, "resources": resources}]
        stage.pop("pin", None)
    metadata = {"name": name, "namespace": NAMESPACE}
    await installation.apply(
        {"apiVersion": API_VERSION, "kind": "InferencePipeline", "metadata": metadata, "spec": spec}
    )
    planned = {"variant": "none", "batchSize": 1, "replicas": 1, "cores": "10m", "accuracy": 0.5}
    stages = [{"name": stage["name"], **planned} for stage in spec["stages"]]
    plan = {"pipeline": name, "generation": 1, "createdAt": time.time(), "stages": stages}
    body = {"apiVersion": API_VERSION, "kind": "PipelinePlan", "metadata": metadata, "spec": plan}
    await installation.cluster.apply(body, manager=MANAGER)
    other = ObservedPipeline(installation, name, pipeline.session)

    async def is_reported() -> bool:
        return (await other.condition("StagesReady")).get("reason") == "ImagePullFailed"

    await until(is_reported, "ImagePullFailed", RECOVERY_SECONDS)
    await installation.cluster.delete("InferencePipeline", NAMESPACE, name)


async def stop_minio(pipeline: ObservedPipeline) -> None:
    """Stop MinIO and delete a pod that needs it; the pod is ready again once MinIO is back."""
    installation, stored = pipeline.installation, ObservedPipeline(pipeline.installation, STORED, pipeline.session)
    await installation.kubectl("scale", "deployment/minio", "-n", NAMESPACE, "--replicas=0")
    await _delete(installation, NAMESPACE, (await stored.pods())[0])
    await asyncio.sleep(AWAY_SECONDS)
    await installation.kubectl("scale", "deployment/minio", "-n", NAMESPACE, "--replicas=1")
    await installation.rolled_out("minio", NAMESPACE)
    stages = (await stored.document())["spec"]["stages"]
    names = [stage["variants"][0]["storageUri"].rpartition("/")[2] for stage in stages]
    await _upload(installation, [WEIGHTS / name for name in names])  # its disk ended with its pod

    async def back() -> bool:
        pods = await stored.pods()
        return bool(pods) and all(is_ready(pod) for pod in pods)

    await until(back, "the pipeline that reads from MinIO", RECOVERY_SECONDS)


async def start_minio(installation: Installation) -> dict[str, str]:
    """Start MinIO with a bucket; returns the environment of its clients."""
    await installation.kubectl("apply", "-n", NAMESPACE, "-f", MANIFESTS / "minio.yaml")
    await installation.rolled_out("minio", NAMESPACE)
    await _upload(installation, [])
    endpoint = f"http://{await installation.address('minio', 9000)}"
    return {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}


async def serve_from_minio(installation: Installation, pipeline_file: Path) -> None:
    """Start MinIO, put the lightest variants' weights there, and serve them from it."""
    await start_minio(installation)
    document = pipeline_document(pipeline_file)
    document["metadata"]["name"] = STORED
    document["spec"]["budget"] = {"cores": "200m"}
    for stage in document["spec"]["stages"]:
        variant = {field: value for field, value in stage["variants"][0].items() if field != "escalations"}
        weights = pipeline_file.parent / variant["storageUri"]
        await _upload(installation, [weights])
        digest = f"sha256:{hashlib.sha256(weights.read_bytes()).hexdigest()}"
        stored = {"storageUri": f"s3://{BUCKET}/{weights.name}", "digest": digest, "secretName": SECRET}
        stage["variants"] = [variant | stored | {"resources": {"cpu": "100m", "memory": "256Mi"}}]
    await installation.apply(document)
    await installation.kubectl("wait", f"ipl/{STORED}", "-n", NAMESPACE, "--for=condition=Ready", "--timeout=600s")


async def _upload(installation: Installation, files: list[Path]) -> None:
    client = Minio(await installation.address("minio", 9000), ACCESS_KEY, SECRET_KEY, secure=False)
    if not await asyncio.to_thread(client.bucket_exists, BUCKET):
        await asyncio.to_thread(client.make_bucket, BUCKET)
    for file in files:
        await asyncio.to_thread(client.fput_object, BUCKET, file.name, str(file))


async def _delete(installation: Installation, namespace: str, pod: Object, *options: str) -> None:
    await installation.kubectl("delete", "pod", pod["metadata"]["name"], "-n", namespace, "--wait=false", *options)


async def _replaced(pods: Callable[[], Awaitable[list[Object]]], gone: Object, count: int) -> None:
    async def back() -> bool:
        others = [pod for pod in await pods() if is_ready(pod) and pod["metadata"]["uid"] != gone["metadata"]["uid"]]
        return len(others) >= count

    await until(back, f"the replacement of {gone['metadata']['name']}", RECOVERY_SECONDS)
