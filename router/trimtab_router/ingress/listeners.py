"""Shell: everything a router listens on: for callers (behind Envoy or alone), for administration, for Envoy itself."""

import asyncio
from pathlib import Path

from aiohttp import web

from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_router.envoy.admin_client import EnvoyAdmin
from trimtab_router.envoy.memory_limits import heap_bytes
from trimtab_router.envoy.overload_controller import OverloadController
from trimtab_router.envoy.sockets import Sockets
from trimtab_router.ingress.admin import AdminIngress
from trimtab_router.ingress.envoy_control import EnvoyControl
from trimtab_router.ingress.grpc_services import GrpcServices
from trimtab_router.ingress.http_server import HttpServer
from trimtab_router.ingress.task_api import TaskApi
from trimtab_router.router import Router

FAREWELL_SECONDS = 1.0
"""How long connections on which nothing is under way are kept, once nobody can connect any more."""
BACKLOG = 4096


class Listener:
    """One server that listens."""

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._runner = web.ServerRunner(server)
        self.port = 0

    async def on_port(self, host: str, port: int) -> "Listener":
        """Listen on a TCP port, 0 for a free one; raises OSError where it is taken."""
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, backlog=BACKLOG).start()
        self.port = int(self._runner.addresses[0][1])
        return self

    async def on_socket(self, path: Path) -> "Listener":
        """Listen on a Unix socket; one that a router before left there is replaced."""
        path.unlink(missing_ok=True)  # noqa: ASYNC240 - once, at the start
        await self._runner.setup()
        await web.UnixSite(self._runner, str(path), backlog=BACKLOG).start()
        return self

    @property
    def connected(self) -> bool:
        """Whether anybody is."""
        return bool(self._server.connections)

    async def stop_listening(self) -> None:
        """Take no more connections."""
        for site in list(self._runner.sites):
            await site.stop()

    async def close(self) -> None:
        """Cut the connections that are left."""
        await self._runner.cleanup()


class Listeners:
    """The listening servers of a router.

    Callers reach it through Envoy (`open_behind_envoy`), or, where there is none, over REST alone (`open_alone`).
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._requests: list[Listener] = []
        self._others: list[Listener] = []
        self._services: GrpcServices | None = None
        self._steering: asyncio.Task[None] | None = None
        self.envoy: EnvoyAdmin | None = None
        self.rest_port = 0
        self.admin_port = 0

    async def open_alone(self, host: str, rest_port: int) -> None:
        """Listen for callers over plain REST; raises OSError where the port is taken."""
        server = HttpServer(self._router, speaks_grpc=False).server()
        self._requests.append(await Listener(server).on_port(host, rest_port))
        self.rest_port = self._requests[-1].port

    async def open_behind_envoy(self, sockets: Sockets, settings: EdgeSettings) -> EnvoyControl:
        """Listen for Envoy on the sockets; returns what tells it the keys in force."""
        server = HttpServer(self._router, speaks_grpc=True).server()
        self._requests.append(await Listener(server).on_socket(sockets.requests))
        self._services = GrpcServices(self._router)
        await self._services.open(sockets.services)
        control = EnvoyControl(
            settings,
            namespace=self._router.pipeline.metadata.namespace,
            pipeline=self._router.pipeline.name,
            longest_seconds=self._router.longest_seconds,
        )
        self._others.append(await Listener(control.server()).on_socket(sockets.control))
        counted = self._router.accounts.refused_at_door
        self.envoy = EnvoyAdmin(sockets.envoy, sockets.counted, counted, heap_bytes(settings))
        steering = OverloadController(self.envoy, sockets.pressure, self._router.pacer)
        self._steering = asyncio.create_task(steering.run(), name="steer envoy")
        return control

    async def open_admin(self, host: str, port: int, registry: TaskApi | None = None) -> None:
        """Listen for administration; raises OSError where the port is taken."""
        ingress = AdminIngress(self._router, self._catch_up, registry)
        self._others.append(await Listener(ingress.server()).on_port(host, port))
        self.admin_port = self._others[-1].port

    async def _catch_up(self) -> None:
        if self.envoy is not None:
            await self.envoy.catch_up()

    @property
    def _connected(self) -> bool:
        return any(server.connected for server in self._requests)

    async def leave(self, linger_seconds: float) -> None:
        """Be not ready, and send callers on to other routers, for a time in which requests are still taken."""
        self._router.leaving = True
        if self.envoy is not None and linger_seconds:
            await self.envoy.send_callers_away()
        await asyncio.sleep(linger_seconds)

    async def close(self) -> None:
        """Stop listening, answer what was accepted, for as long as it was promised to take, close.

        Who connected in the last moment is read too, and told to try another router.
        """
        if self.envoy is not None:
            await self.envoy.stop_listening()
        else:
            for server in self._requests:
                await server.stop_listening()
        await self._router.drain(self._router.pipeline.spec.slo.drain_seconds)
        if self.envoy is None:
            await self._say_farewell()
        if self._steering is not None:
            self._steering.cancel()
            await asyncio.gather(self._steering, return_exceptions=True)
        if self.envoy is not None:
            await self.envoy.close()
        if self._services is not None:
            await self._services.close()
        for server in (*self._requests, *self._others):
            await server.close()

    async def _say_farewell(self) -> None:
        give_up = asyncio.get_running_loop().time() + FAREWELL_SECONDS
        while self._connected and asyncio.get_running_loop().time() < give_up:  # noqa: ASYNC110 - no event covers all
            await asyncio.sleep(0.01)
