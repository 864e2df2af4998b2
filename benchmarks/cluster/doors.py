"""Faults of routers and of the Envoys before them; one kills processes, so the node must be this machine."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from benchmarks.cluster.breaking import PATIENCE_SECONDS
from benchmarks.cluster.observing import NotYetError, Watched, is_ready, until
from trimtab_kubernetes.objects import Object
from trimtab_operator.manifests.envoy_sidecar import NAME as EDGE
from trimtab_pipelines.kubernetes_names import router_name

ENVOY = "envoy"


async def restart_routers(watched: Watched) -> None:
    """Put another router in each one's place, as a new release does; back once all are new."""
    name, namespace = router_name(watched.name), watched.setting.namespace
    await watched.setting.kubectl("rollout", "restart", f"deployment/{name}", "-n", namespace)
    await watched.setting.rolled_out(name, namespace, PATIENCE_SECONDS)


async def kill_doors(watched: Watched) -> None:
    """Kill the Envoy of every router's pod at once; back once each of the same pods is ready with another."""
    pods = await watched.pods("router")
    for process in [process for pod in pods for process in _processes(pod, ENVOY)]:
        os.kill(process, signal.SIGKILL)

    async def back() -> bool:
        now = {pod["metadata"]["uid"]: pod for pod in await watched.pods("router")}
        return all(_has_another(now.get(pod["metadata"]["uid"]), pod) for pod in pods)

    await until(back, "the doors", PATIENCE_SECONDS)


def _has_another(now: Object | None, before: Object) -> bool:
    """Whether a pod is ready with another door than it had."""
    return now is not None and is_ready(now) and _door(now)["containerID"] != _door(before)["containerID"]


def _door(pod: Object) -> Object:
    return dict(next(each for each in pod["status"]["initContainerStatuses"] if each["name"] == EDGE))


def _processes(pod: Object, program: str) -> list[int]:
    """This machine's processes of a program in a pod, which their control groups are named after."""
    uid = str(pod["metadata"]["uid"])
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            in_pod = uid in (folder / "cgroup").read_text().replace("_", "-")
            if in_pod and (folder / "comm").read_text().strip() == program:
                found.append(int(folder.name))
    if not found:
        raise NotYetError(f"no {program} of pod {pod['metadata']['name']} runs on this machine")
    return found
