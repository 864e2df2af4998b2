"""Wires a router to its files, its front doors and its signals; listens, serves, drains."""

import asyncio
import json
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from trimtab_pipelines.documents import load_pipeline
from trimtab_router.ingress.grpc import GrpcIngress
from trimtab_router.ingress.rest import RestIngress
from trimtab_router.plans import FileWatcher
from trimtab_router.router import Limits, Router
from trimtab_router.telemetry import configured_tracer

DRAIN_SECONDS = 30.0
BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says; port 0 lets the system choose."""

    pipeline: Path
    plan: Path
    endpoints: Path
    host: str = "127.0.0.1"
    rest_port: int = 0
    grpc_port: int = 0
    limits: Limits = field(default_factory=Limits)


class FrontDoors:
    """The listening REST and gRPC servers of a router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._runner = web.ServerRunner(RestIngress(router).server())
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

    async def close(self) -> None:
        """Answer what was accepted, then stop listening."""
        await self._router.drain(DRAIN_SECONDS)
        await self._grpc.close(grace_seconds=1.0)
        await self._runner.cleanup()


async def serve(options: Options) -> None:
    """Serve until SIGTERM or SIGINT; raises DocumentError where the pipeline cannot be used."""
    pipeline = load_pipeline(options.pipeline)
    router = Router(pipeline, limits=options.limits, tracer=configured_tracer(pipeline.name))
    watcher = FileWatcher(router, options.plan, options.endpoints)
    watcher.read()
    doors = FrontDoors(router)
    await doors.open(options.host, options.rest_port, options.grpc_port)
    watching = asyncio.create_task(watcher.watch())
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    sys.stdout.write(json.dumps({"rest_port": doors.rest_port, "grpc_port": doors.grpc_port}) + "\n")
    sys.stdout.flush()
    stopped = asyncio.create_task(stopping.wait())
    await asyncio.wait({stopped, watching}, return_when=asyncio.FIRST_COMPLETED)
    await doors.close()
    if watching.done():
        watching.result()  # a watcher that failed is an error of the process
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
