"""An adapter of a cluster, as a process, and what it works with: objects in a real API server, routers of real HTTP."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.adapter.scenes import FakeRouter, a_ladder, profiles_of
from tests.builders import a_body
from tests.processes import own_address
from trimtab_adapter.__main__ import parse
from trimtab_adapter.cluster import main
from trimtab_kubernetes import Cluster, list_and_watch, process
from trimtab_kubernetes.objects import Object
from trimtab_pipelines.kubernetes_names import ADMIN_PORT_NAME, profile_name, router_admin_name
from trimtab_pipelines.spec import InferencePipeline

INTERVAL = "1s"
SECONDS = 100.0
Objects = dict[str, Any]


def a_pipeline_of(namespace: str, name: str = "sample", **changes: Any) -> InferencePipeline:
    """The ladder of two stages, planned for often."""
    adaptation = {"interval": INTERVAL, "scaleDownStabilization": "0s", "forecaster": "Reactive"} | changes.pop(
        "adaptation", {}
    )
    return a_ladder(adaptation=adaptation, **changes).with_metadata(name=name, namespace=namespace)


def profile_bodies(pipeline: InferencePipeline) -> list[Objects]:
    """What the profiler applies."""
    bodies = []
    for stage, profile in profiles_of(pipeline).items():
        body = a_body(profile, profile_name(pipeline.name, stage), pipeline.metadata.namespace)
        body["spec"]["pipeline"] = pipeline.name
        bodies.append(body)
    return bodies


async def put(cluster: Cluster, pipeline: InferencePipeline, *, profiled: bool = True) -> None:
    await cluster.apply(a_body(pipeline), manager="user")
    for body in profile_bodies(pipeline) if profiled else []:
        await cluster.apply(body, manager="trimtab-profiler")


def a_slice(namespace: str, pipeline: str, ports: list[int], **conditions: bool) -> list[Objects]:
    """The EndpointSlices of routers at these ports of this machine: a slice a port, for all share one address."""
    return [
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": f"{router_admin_name(pipeline)}-{n}",
                "namespace": namespace,
                "labels": {"kubernetes.io/service-name": router_admin_name(pipeline)},
            },
            "addressType": "IPv4",
            "ports": [{"name": ADMIN_PORT_NAME, "port": port, "protocol": "TCP"}],
            "endpoints": [{"addresses": [own_address()], "conditions": {"ready": True} | conditions}],
        }
        for n, port in enumerate(ports)
    ]


async def routed(cluster: Cluster, namespace: str, pipeline: str, *routers: FakeRouter) -> None:
    """Make these routers those of a pipeline."""
    for body in a_slice(namespace, pipeline, [int(router.url.rpartition(":")[2]) for router in routers]):
        await cluster.apply(body, manager="tests")


async def seen(cluster: Cluster, kind: str, namespace: str, name: str, is_so: Callable[[Object], bool]) -> Object:
    """Wait until an object is as wanted; the failure shows how it was last."""
    last: Object = {}
    try:
        async with asyncio.timeout(SECONDS):
            async for change in list_and_watch(cluster, kind, namespace):
                if change.key == (namespace, name) and not change.deleted and change.object is not None:
                    last = change.object
                    if is_so(last):
                        return last
    except TimeoutError:
        raise AssertionError(f"{kind} {name} never was as wanted; last: {last}") from None
    raise AssertionError("the watch ended")


def condition(found: Object, name: str) -> Objects:
    """A condition of a pipeline, empty where there is none."""
    conditions = found.get("status", {}).get("conditions", [])
    return next((one for one in conditions if one["type"] == name), {})


@dataclass(frozen=True)
class Adapter:
    """A running adapter's own addresses."""

    health: str
    metrics: str


@asynccontextmanager
async def an_adapter(
    kubeconfig: Path, namespace: str, *arguments: str, name: str = "adapter-0"
) -> AsyncIterator[Adapter]:
    """Run an adapter of one namespace in this process; it ends with the block."""
    stop, listening = asyncio.Event(), Listening()
    options = parse(["--cluster", "--namespaces", namespace, "--health-port=0", "--metrics-port=0", *arguments])
    cluster = await Cluster.connect(str(kubeconfig))
    process.log.addHandler(listening)
    process.log.setLevel(logging.INFO)
    running = asyncio.create_task(
        main.run_elected(options, cluster, main.adapter_lease(cluster, namespace, name), stop)
    )
    try:
        yield Adapter(await listening.address("/healthz"), await listening.address("/metrics"))
    finally:
        process.log.removeHandler(listening)
        stop.set()
        await running


class Listening(logging.Handler):
    """Learns from an adapter's log where it listens."""

    def __init__(self) -> None:
        super().__init__()
        self._ports: dict[str, asyncio.Future[int]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Take `PATH on port N`."""
        if record.msg == "%s on port %d" and isinstance(record.args, tuple):
            path, port = record.args
            if not self._port(str(path)).done():  # a second adapter in this process has a listener of its own
                self._port(str(path)).set_result(int(str(port)))

    async def address(self, path: str) -> str:
        """The address of a path once it is known."""
        return f"http://127.0.0.1:{await self._port(path)}{path}"

    def _port(self, path: str) -> "asyncio.Future[int]":
        return self._ports.setdefault(path, asyncio.get_running_loop().create_future())
