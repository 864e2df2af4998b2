"""`Listeners`: the router's servers for requests (behind Envoy or direct), administration, and Envoy's control."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_protocol.chat.engine_routes import ROUTES
from trimtab_protocol.event_loop import start_service
from trimtab_protocol.host_check import HostCheck
from trimtab_router.envoy.api_keys import HashedKey
from trimtab_router.envoy.bootstrap import max_large_requests
from trimtab_router.envoy.overload_controller import EnvoyAdmin, OverloadController
from trimtab_router.envoy.route_discovery import envoy_routes, route_discovery_response
from trimtab_router.envoy.sockets import Sockets
from trimtab_router.ingress.admin import AdminIngress
from trimtab_router.ingress.base import foreign_host_response
from trimtab_router.ingress.grpc import GrpcIngress, is_call
from trimtab_router.ingress.grpc_services import GrpcServices
from trimtab_router.ingress.openai import PREFIX, OpenAiIngress
from trimtab_router.ingress.rest import RestIngress
from trimtab_router.ingress.task_api import TaskApi
from trimtab_router.limits import heap_bytes
from trimtab_router.router import Router

log = logging.getLogger(__name__)

_JWKS = "/jwks/"
_MAX_JWKS_BYTES = 2**20


class EnvoyControl:
    """HTTP handler of the control socket: no routes before the keys are read; requests end within `max_seconds`."""

    def __init__(
        self,
        settings: EdgeSettings,
        *,
        namespace: str,
        pipeline: str,
        max_seconds: float,
        host_check: HostCheck | None = None,
    ) -> None:
        self.settings = settings
        # A page cannot send keys that it does not know, and its host name does not match the certificate.
        self._host_check = None if settings.authenticates or settings.tls else host_check
        self._labels = {"namespace": namespace, "pipeline": pipeline}
        self._max_seconds = max_seconds
        self.routes = b""
        if not (settings.keys_file or settings.keys_secret):
            self.use_keys(())

    def use_keys(self, keys: Sequence[HashedKey]) -> None:
        routes = envoy_routes(
            self.settings, keys, **self._labels, max_seconds=self._max_seconds, host_check=self._host_check
        )
        self.routes = route_discovery_response(routes)

    def server(self) -> web.Server:
        return web.Server(self._respond, access_log=None)

    async def _respond(self, request: web.BaseRequest) -> web.Response:
        if request.path == "/v3/discovery:routes":
            await request.read()
            if not self.routes:
                return web.Response(status=503)  # keys are not read yet; Envoy keeps its current routes
            return web.Response(body=self.routes, content_type="application/json")
        number = request.path.removeprefix(_JWKS)
        if request.path.startswith(_JWKS) and number.isdecimal() and int(number) < len(self.settings.jwt):
            return _jwks_response(Path(self.settings.jwt[int(number)].jwks))
        return web.Response(status=404)


def _jwks_response(path: Path) -> web.Response:
    """Read a key set for each request. An invalid one is logged, and Envoy keeps the previous one."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_JWKS_BYTES)  # a longer file is truncated, and so invalid JSON
        json.loads(content)
    except (OSError, ValueError) as error:
        log.warning("token issuer's keys %s: %s; the last valid keys stay in use", path, error)
        return web.Response(status=503)
    return web.Response(body=content, content_type="application/json")


FAREWELL_SECONDS = 1.0  # time that idle connections are kept after listening has stopped
BACKLOG = 4096


class HttpServer:
    """HTTP handler of requests. gRPC needs Envoy, which turns HTTP/1.1 trailers into its own."""

    def __init__(self, router: Router, host_check: HostCheck, *, serves_grpc: bool) -> None:
        self._router = router
        self._host_check = host_check
        self._loop = asyncio.get_running_loop()
        self._rest = RestIngress(router)
        self._openai = OpenAiIngress(router)
        self._grpc = GrpcIngress(router) if serves_grpc else None

    def server(self) -> web.Server:
        return web.Server(
            self._respond,
            request_factory=self._make_request,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
        )

    def _make_request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        limit = self._router.limits.max_payload_bytes
        return web.BaseRequest(message, payload, protocol, writer, task, self._loop, client_max_size=limit)

    def _respond(self, request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        if self._grpc is not None and is_call(request):
            return self._grpc.answer(request)
        if not self._host_check.accepts(request.headers):
            return refuse_foreign_host()
        if request.path.startswith(PREFIX) or request.path in ROUTES:
            return self._openai.answer(request)
        return self._rest.answer(request)


async def refuse_foreign_host() -> web.Response:
    return foreign_host_response()


class Listener:
    """One listening server."""

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._runner = web.ServerRunner(server)
        self.port = 0

    async def on_port(self, host: str, port: int) -> "Listener":
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, backlog=BACKLOG).start()
        self.port = int(self._runner.addresses[0][1])
        return self

    async def on_socket(self, path: Path) -> "Listener":
        """Listen on a Unix socket. A socket left by a previous router is replaced."""
        path.unlink(missing_ok=True)  # noqa: ASYNC240 - once, at the start
        await self._runner.setup()
        await web.UnixSite(self._runner, str(path), backlog=BACKLOG).start()
        return self

    @property
    def connected(self) -> bool:
        return bool(self._server.connections)

    async def stop_listening(self) -> None:
        for site in list(self._runner.sites):
            await site.stop()

    async def close(self) -> None:
        await self._runner.cleanup()


class Listeners:
    """Listening servers of a router: behind Envoy, or directly over REST."""

    def __init__(self, router: Router, host_check: HostCheck | None = None) -> None:
        self._router = router
        self._host_check = host_check or HostCheck()
        self.request_listeners: list[Listener] = []
        self._others: list[Listener] = []
        self._services: GrpcServices | None = None
        self.overload_task: asyncio.Task[None] | None = None
        self.envoy: EnvoyAdmin | None = None
        self.rest_port = 0
        self.admin_port = 0

    async def listen_without_proxy(self, host: str, rest_port: int) -> None:
        """Listen for plain REST. Raises OSError if the port is in use."""
        server = HttpServer(self._router, self._host_check, serves_grpc=False).server()
        self.request_listeners.append(await Listener(server).on_port(host, rest_port))
        self.rest_port = self.request_listeners[-1].port

    async def listen_behind_envoy(self, sockets: Sockets, settings: EdgeSettings) -> EnvoyControl:
        """Listen for Envoy on the sockets. Returns the control through which Envoy gets its API keys."""
        server = HttpServer(self._router, HostCheck(), serves_grpc=True).server()
        self.request_listeners.append(await Listener(server).on_socket(sockets.requests))
        self._services = GrpcServices(self._router)
        await self._services.open(sockets.services)
        control = EnvoyControl(
            settings,
            namespace=self._router.pipeline.metadata.namespace,
            pipeline=self._router.pipeline.name,
            max_seconds=self._router.max_request_seconds,
            host_check=self._host_check,
        )
        self._others.append(await Listener(control.server()).on_socket(sockets.control))
        count_rejections = self._router.accounting.count_proxy_rejections
        concurrency, heap = self._router.admission.concurrency, heap_bytes(settings)
        self.envoy = EnvoyAdmin(sockets.envoy_admin, sockets.counters_file, count_rejections, heap)
        self._router.admission.uploads.max_requests = lambda: max_large_requests(
            concurrency.concurrency_limit.limit, heap
        )
        controller = OverloadController(self.envoy, sockets.pressure, concurrency)
        self.overload_task = start_service("Envoy's overload control", controller.run)
        return control

    async def listen_admin(self, host: str, port: int, task_api: TaskApi | None = None) -> None:
        """Listen for administration. Raises OSError if the port is in use."""
        ingress = AdminIngress(self._router, self._sync_counters, task_api, self._host_check)
        self._others.append(await Listener(ingress.server()).on_port(host, port))
        self.admin_port = self._others[-1].port

    async def _sync_counters(self) -> None:
        if self.envoy is not None:
            await self.envoy.sync_counters()

    @property
    def _connected(self) -> bool:
        return any(server.connected for server in self.request_listeners)

    async def terminate(self, linger_seconds: float) -> None:
        """Report not ready and ask clients to connect elsewhere, while requests are still served."""
        self._router.terminating = True
        if self.envoy is not None and linger_seconds:
            await self.envoy.drain_gracefully()
        await asyncio.sleep(linger_seconds)

    async def close(self) -> None:
        """Stop listening, answer accepted requests within the SLO's time limit, even those still unread, and close."""
        if self.envoy is not None:
            await self.envoy.stop_listening()
        else:
            for server in self.request_listeners:
                await server.stop_listening()
        await self._router.drain(self._router.pipeline.spec.slo.drain_seconds)
        if self.envoy is None:
            await self._await_disconnects()
        if self.overload_task is not None:
            self.overload_task.cancel()
            await asyncio.gather(self.overload_task, return_exceptions=True)
        if self.envoy is not None:
            await self.envoy.close()
        if self._services is not None:
            await self._services.close()
        for server in (*self.request_listeners, *self._others):
            await server.close()

    async def _await_disconnects(self) -> None:
        deadline = asyncio.get_running_loop().time() + FAREWELL_SECONDS
        while self._connected and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 - no event covers all
            await asyncio.sleep(0.01)
