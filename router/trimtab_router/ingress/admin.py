"""`AdminIngress`: the router's admin port, with health, metrics, arrivals, state and tasks.

Prometheus, the adapter and the kubelet call it. All paths are read-only except tasks, which require an admin key to be
registered or deleted. Calls other than probes and scrapes are written to the audit log.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from trimtab_pipelines.router_state import (
    ARRIVALS_PATH,
    HISTORY_SECONDS,
    LIVE_PATH,
    READY_PATH,
    STATE_PATH,
    TASKS_PATH,
    StateModel,
)
from trimtab_protocol.host_check import HostCheck
from trimtab_router.ingress.audit_log import AdminAuditLog, AdminCall
from trimtab_router.ingress.base import foreign_host_response, health_response, json_response
from trimtab_router.ingress.task_api import TaskApi
from trimtab_router.router import Router

AUDIT_LOG = "trimtab_router.audit"
log = logging.getLogger(AUDIT_LOG)

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_Route = Callable[[web.BaseRequest], Awaitable[web.Response]]


class AdminIngress:
    """HTTP handler of the admin port. Before it reads counts, `sync_counters` adds Envoy's rejections to them."""

    def __init__(
        self,
        router: Router,
        sync_counters: Callable[[], Awaitable[object]],
        task_api: TaskApi | None = None,
        host_check: HostCheck | None = None,
    ) -> None:
        self._router = router
        self._task_api = task_api or TaskApi(router)
        self._sync_counters = sync_counters
        self._host_check = host_check or HostCheck()
        self._audit_log = AdminAuditLog()
        self._routes: dict[str, _Route] = {
            LIVE_PATH: self._live,
            "/v2/health/live": self._live,
            "/v2/health/ready": self._ready,
            "/metrics": self._metrics,
            ARRIVALS_PATH: self._arrivals,
            STATE_PATH: self._state,
            READY_PATH: self._accepts_traffic,
            TASKS_PATH: self._task_api.list_tasks,
        }

    def server(self) -> web.Server:
        return web.Server(self.answer, access_log=None)

    async def answer(self, request: web.BaseRequest) -> web.Response:
        key_client = ""
        if not self._host_check.accepts(request.headers):
            response = foreign_host_response()
        elif request.path.startswith(f"{TASKS_PATH}/"):
            response, key_client = await self._task_api.change_task(request)
        else:
            response = await self._respond(request)
        call = AdminCall(request.method, request.path, request.remote or "", response.status, key_client)
        line = self._audit_log.line(call, time.time())
        if line is not None:
            log.info(line)
        return response

    async def _respond(self, request: web.BaseRequest) -> web.Response:
        route = self._routes.get(request.path.rstrip("/"))
        if route is None:
            return json_response({"error": f"unknown path; this port serves {', '.join(self._routes)}"}, 404)
        if request.method not in {"GET", "HEAD"}:
            return json_response({"error": f"{request.path} is read-only: use GET"}, 405)
        return await route(request)

    async def _live(self, _: web.BaseRequest) -> web.Response:
        return health_response(self._router, live=True)

    async def _ready(self, _: web.BaseRequest) -> web.Response:
        return health_response(self._router, live=False)

    async def _metrics(self, _: web.BaseRequest) -> web.Response:
        await self._sync_counters()
        body = []
        for family in self._router.metrics.exposition():
            body.append(family)
            await asyncio.sleep(0)
        return web.Response(body=b"".join(body), headers={"Content-Type": _METRICS_TYPE})

    async def _arrivals(self, request: web.BaseRequest) -> web.Response:
        seconds = request.query.get("seconds", str(HISTORY_SECONDS))
        if not (seconds.isascii() and seconds.isdigit() and len(seconds) <= 9 and int(seconds) > 0):
            return json_response({"error": f"seconds={seconds[:20]}: expected a whole number of at least 1"}, 400)
        await self._sync_counters()
        return _model_response(self._router.arrival_history(int(seconds)))

    async def _state(self, _: web.BaseRequest) -> web.Response:
        await self._sync_counters()
        return _model_response(self._router.state())

    async def _accepts_traffic(self, _: web.BaseRequest) -> web.Response:
        ready = self._router.accepts_traffic
        return json_response({"ready": ready}, 200 if ready else 503)


def _model_response(content: StateModel) -> web.Response:
    return web.Response(body=content.model_dump_json().encode(), content_type="application/json")
