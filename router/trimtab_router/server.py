"""Wires a router to its files or its cluster, its front doors and its signals; listens, serves, drains."""

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from trimtab_pipelines.documents import load_pipeline
from trimtab_pipelines.spec import InferencePipeline
from trimtab_router.ingress.grpc import GrpcIngress
from trimtab_router.ingress.rest import RestIngress
from trimtab_router.plans import FileWatcher
from trimtab_router.router import Limits, Router
from trimtab_router.telemetry import configured_tracer

DRAIN_SECONDS = 30.0
FAREWELL_SECONDS = 1.0
"""How long connections on which nothing is under way are kept, once nobody can connect any more."""
BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says; port 0 lets the system choose.

    Without `endpoints` the replicas, and every plan after the first, are what the cluster's API says. `namespace` is
    where the pipeline lives, if the file does not say so. `linger_seconds` is how long a router that was told to stop
    takes requests, not ready any more.
    """

    pipeline: Path
    plan: Path
    endpoints: Path | None
    namespace: str | None = None
    linger_seconds: float = 0.0
    host: str = "127.0.0.1"
    rest_port: int = 0
    grpc_port: int = 0
    limits: Limits = field(default_factory=Limits)


class FrontDoors:
    """The listening REST and gRPC servers of a router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._rest = RestIngress(router).server()
        self._runner = web.ServerRunner(self._rest)
        self._grpc = GrpcIngress(router)
        self.rest_port = 0
        self.grpc_port = 0

    async def open(self, host: str, rest_port: int, grpc_port: int) -> None:
        """Listen on both; raises OSError where a port is taken."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, rest_port, backlog=BACKLOG)
        await site.start()
        self.rest_port = int(self._runner.addresses[0][1])
        self.grpc_port = await self._grpc.open(host, grpc_port, BACKLOG)

    @property
    def _connected(self) -> bool:
        return bool(self._rest.connections) or self._grpc.connected

    async def leave(self, linger_seconds: float) -> None:
        """Be not ready, and send callers on to other routers, for a time in which requests are still taken."""
        self._router.leaving = True
        self._grpc.leave()
        await asyncio.sleep(linger_seconds)

    async def close(self) -> None:
        """Stop listening, answer what was accepted, close.

        Who connected in the last moment is read too, and told to try another router.
        """
        for site in list(self._runner.sites):
            await site.stop()
        self._grpc.stop_listening()
        await self._router.drain(DRAIN_SECONDS)
        give_up = asyncio.get_running_loop().time() + FAREWELL_SECONDS
        while self._connected and asyncio.get_running_loop().time() < give_up:  # noqa: ASYNC110 - no event covers all
            await asyncio.sleep(0.01)
        self._grpc.close()
        await self._runner.cleanup()


async def serve(options: Options) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        DocumentError: the pipeline cannot be used.
        RuntimeError: there is no cluster to follow.
    """
    pipeline = _within(load_pipeline(options.pipeline), options.namespace)
    router = Router(pipeline, limits=options.limits, tracer=configured_tracer(pipeline.name))
    async with AsyncExitStack() as stack:
        files = FileWatcher(router, options.plan, options.endpoints)
        files.read()
        if options.endpoints is None:
            follow = await _follow_cluster(router, stack)
        else:
            follow = files.watch()
        doors = FrontDoors(router)
        await doors.open(options.host, options.rest_port, options.grpc_port)
        await _serve_until_stopped(doors, asyncio.ensure_future(follow), options.linger_seconds)


async def _follow_cluster(router: Router, stack: AsyncExitStack) -> Awaitable[None]:
    from trimtab_kubernetes import Cluster, ClusterError  # noqa: PLC0415  (takes a second of processor time to import)
    from trimtab_router.cluster import ClusterWatcher  # noqa: PLC0415

    try:
        cluster = await stack.enter_async_context(await Cluster.connect())
    except ClusterError as error:
        raise RuntimeError(str(error)) from error
    return ClusterWatcher(router, cluster, router.pipeline.metadata.namespace).watch()


async def _serve_until_stopped(doors: FrontDoors, watching: "asyncio.Future[None]", linger_seconds: float) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    sys.stdout.write(json.dumps({"rest_port": doors.rest_port, "grpc_port": doors.grpc_port}) + "\n")
    sys.stdout.flush()
    stopped = asyncio.create_task(stopping.wait())
    first: set[asyncio.Future[Any]] = {stopped, watching}
    await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
    if stopped.done():
        await doors.leave(linger_seconds)
    await doors.close()
    stopped.cancel()
    if watching.done():
        watching.result()  # a watcher that failed is an error of the process
    watching.cancel()
    await asyncio.gather(watching, stopped, return_exceptions=True)


def _within(pipeline: InferencePipeline, namespace: str | None) -> InferencePipeline:
    if namespace is None:
        return pipeline
    return pipeline.model_copy(update={"metadata": pipeline.metadata.model_copy(update={"namespace": namespace})})
