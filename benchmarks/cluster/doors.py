"""Faults of routers and of the Envoys before them; one kills processes, so the node must be this machine."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from benchmarks.cluster.breaking import PATIENCE_SECONDS
from benchmarks.cluster.observing import NotYetError, Watched, is_ready, until
from trimtab_kubernetes.client import Object
from trimtab_operator.edge import NAME as EDGE
from trimtab_pipelines.cluster import router_name

ENVOY = "envoy"


async def restart_routers(watched: Watched) -> None:
    """Put another router in each one's place, as a new release does; back once all are new."""
    name, namespace = router_name(watched.name), watched.setting.namespace
    await watched.setting.kubectl("rollout", "restart", f"deployment/{name}", "-n", namespace)
    await watched.setting.rolled_out(name, namespace, PATIENCE_SECONDS)


async def kill_door(watched: Watched) -> None:
    """Kill the Envoy of one of the router's pods; back once another is ready in its place, in the same pod."""
    pod = (await watched.pods("router"))[0]
    name, restarts = pod["metadata"]["name"], _door(pod)["restartCount"]
    for process in _processes(pod, ENVOY):
        os.kill(process, signal.SIGKILL)

    async def back() -> bool:
        found = await watched.setting.cluster.get("Pod", watched.setting.namespace, name)
        return found is not None and is_ready(found) and bool(_door(found)["restartCount"] > restarts)

    await until(back, f"the door of {name}", PATIENCE_SECONDS)


def _door(pod: Object) -> Object:
    return dict(next(each for each in pod["status"]["initContainerStatuses"] if each["name"] == EDGE))


def _processes(pod: Object, program: str) -> list[int]:
    """Return this machine's processes of a program in a pod, which their control groups are named after."""
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
