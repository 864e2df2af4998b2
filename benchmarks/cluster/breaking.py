"""The faults: each breaks one thing as it breaks in life, and tells when all is as before. Returns seconds."""

import copy
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.cluster.changing import write_plan
from benchmarks.cluster.crowding import full_nodes
from benchmarks.cluster.observing import Watched, is_ready, until
from benchmarks.cluster.setting import MANAGER, ROOT, SYSTEM, Setting, run
from trimtab_kubernetes.objects import Object
from trimtab_pipelines.resource import API_VERSION

PATIENCE_SECONDS = 180.0
UNKNOWN = "no-such-variant"


@dataclass(frozen=True, slots=True)
class Fault:
    """What breaks, and how; `strike` returns once all is as before."""

    name: str
    strike: Callable[[Watched], Awaitable[None]]
    holds_requests: bool = False
    """Requests may be in its hands when it strikes: those, and only those, may fail."""


async def seconds_of(fault: Fault, watched: Watched) -> float:
    """Strike, and return the seconds until all was as before."""
    began = time.monotonic()
    await fault.strike(watched)
    return time.monotonic() - began


async def delete_model_pod(watched: Watched) -> None:
    """Delete a pod that serves; back once another is ready in its place."""
    pods = await watched.pods()
    victim = next(pod for pod in pods if is_ready(pod))
    await _delete(watched.setting, watched.setting.namespace, victim, force=False)
    await _replaced(watched.pods, victim, len(pods))
    await until(lambda: _serves(watched), "the router's replicas", PATIENCE_SECONDS)


def on_full_nodes(strike: Callable[[Watched], Awaitable[None]]) -> Callable[[Watched], Awaitable[None]]:
    """Strike where no node has room for another pod before one is gone."""

    async def crowded(watched: Watched) -> None:
        async with full_nodes(watched.setting):
            await strike(watched)

    return crowded


async def delete_router_pod(watched: Watched) -> None:
    """Delete one of the router's pods; back once another is ready in its place."""
    pods = await watched.pods("router")
    await _delete(watched.setting, watched.setting.namespace, pods[0], force=False)
    await _replaced(lambda: watched.pods("router"), pods[0], len(pods))


def kill(labels: str) -> Callable[[Watched], Awaitable[None]]:
    """Kill a pod of the system without a word; back once another is ready in its place."""

    async def strike(watched: Watched) -> None:
        async def pods() -> list[Object]:
            return (await watched.setting.cluster.list("Pod", SYSTEM, labels)).items

        before = await pods()
        await _delete(watched.setting, SYSTEM, before[0], force=True)
        await _replaced(pods, before[0], 1)

    return strike


async def restart_api_server(watched: Watched) -> None:
    """Kill the API server and start it anew; back once it answers and the pipeline is ready."""
    await run(ROOT / "hack" / "cluster" / "restart", "kube-apiserver")
    await until(watched.is_ready, "Ready after the API server's restart", PATIENCE_SECONDS)


async def delete_deployment(watched: Watched) -> None:
    """Delete the Deployment of a stage by hand; back once it is there and ready again."""
    pods = await watched.pods()
    owner = pods[0]["metadata"]["labels"]["trimtab.dev/stage"]
    labels = f"trimtab.dev/pipeline={watched.name},trimtab.dev/stage={owner}"
    found = (await watched.setting.cluster.list("Deployment", watched.setting.namespace, labels)).items[0]
    name = found["metadata"]["name"]
    await watched.setting.cluster.delete("Deployment", watched.setting.namespace, name)

    async def back() -> bool:
        now = await watched.setting.cluster.get("Deployment", watched.setting.namespace, name)
        anew = now is not None and now["metadata"]["uid"] != found["metadata"]["uid"]
        return anew and bool(((now or {}).get("status") or {}).get("readyReplicas"))

    await until(back, f"Deployment {name}", PATIENCE_SECONDS)
    await until(lambda: _serves(watched), "the router's replicas", PATIENCE_SECONDS)


async def break_plan(watched: Watched) -> None:
    """Write a plan that does not fit the pipeline; back once a plan that does is in force."""
    stage = ((await watched.object()) or {})["spec"]["stages"][0]["name"]
    await write_plan(watched, stage, variant=UNKNOWN)

    async def replaced() -> bool:
        stages = ((await watched.plan()) or {})["spec"]["stages"]
        return all(each["variant"] != UNKNOWN for each in stages) and await watched.is_ready()

    await until(replaced, "a plan that fits", PATIENCE_SECONDS)


async def apply_missing_image(watched: Watched) -> None:
    """Apply another pipeline whose image does not exist; done once it says so, and is gone again."""
    setting, name = watched.setting, "missing-image"
    document = copy.deepcopy((await watched.object()) or {})
    spec = document["spec"] | {"budget": {"cores": "200m"}}
    for stage in spec["stages"]:
        container = {"image": "localhost/no-such-image:dev", "imagePullPolicy": "Never"}
        stage["variants"] = [
            {"name": "none", "accuracy": 0.5, "container": container, "resources": {"cpu": "50m", "memory": "64Mi"}}
        ]
        stage.pop("pin", None)
    metadata = {"name": name, "namespace": setting.namespace}
    await setting.apply({"apiVersion": API_VERSION, "kind": "InferencePipeline", "metadata": metadata, "spec": spec})
    stages = [
        {"name": s["name"], "variant": "none", "batchSize": 1, "replicas": 1, "cores": "50m", "accuracy": 0.5}
        for s in spec["stages"]
    ]
    plan = {"pipeline": name, "generation": 1, "createdAt": time.time(), "stages": stages}
    body = {"apiVersion": API_VERSION, "kind": "PipelinePlan", "metadata": metadata, "spec": plan}
    await setting.cluster.apply(body, manager=MANAGER)
    other = Watched(setting, name, watched.client)

    async def says_so() -> bool:
        return (await other.condition("StagesReady")).get("reason") == "ImagePullFailed"

    await until(says_so, "ImagePullFailed", PATIENCE_SECONDS)
    await setting.cluster.delete("InferencePipeline", setting.namespace, name)


async def _serves(watched: Watched) -> bool:
    """Whether the router has a ready replica in every stage."""
    return all(stage.ready_replicas > 0 for stage in (await watched.state()).stages.values())


async def _delete(setting: Setting, namespace: str, pod: Object, *, force: bool) -> None:
    how = ("--grace-period=0", "--force") if force else ()
    await setting.kubectl("delete", "pod", pod["metadata"]["name"], "-n", namespace, "--wait=false", *how)


async def _replaced(pods: Callable[[], Awaitable[list[Object]]], gone: Object, count: int) -> None:
    async def back() -> bool:
        ready = [pod for pod in await pods() if is_ready(pod) and pod["metadata"]["uid"] != gone["metadata"]["uid"]]
        return len(ready) >= count

    await until(back, f"what replaces {gone['metadata']['name']}", PATIENCE_SECONDS)
