"""The router's own addresses, on a port that callers do not reach: health, metrics, load and state.

Prometheus, the adapter and the kubelet ask here; callers' own questions (`/v2/health/…`) are answered at the door too.
Everything here is only read but tasks, which who shows a key may register and delete; who else reads, or tries to do
more, is told in the audit log.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from trimtab_pipelines.router_state import (
    ARRIVALS_PATH,
    HISTORY_SECONDS,
    READY_PATH,
    STATE_PATH,
    TASKS_PATH,
    StateModel,
)
from trimtab_router.ingress.audit_log import AdminAuditLog, AdminCall
from trimtab_router.ingress.http_responses import json_response
from trimtab_router.ingress.task_api import TaskApi
from trimtab_router.router import Router

AUDIT_LOG = "trimtab_router.audit"
log = logging.getLogger(AUDIT_LOG)

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_Route = Callable[[web.BaseRequest], Awaitable[web.Response]]


class AdminIngress:
    """The HTTP handler of the administrative port.

    Args:
        router: the router.
        catch_up: awaited before anything is counted, so that what the door refused is in the sums.
        registry: of tasks; None where this router takes none.
    """

    def __init__(
        self, router: Router, catch_up: Callable[[], Awaitable[object]], registry: TaskApi | None = None
    ) -> None:
        self._router = router
        self._registry = registry or TaskApi(router)
        self._catch_up = catch_up
        self._audit = AdminAuditLog()
        self._routes: dict[str, _Route] = {
            "/v2/health/live": self._live,
            "/v2/health/ready": self._ready,
            "/metrics": self._metrics,
            ARRIVALS_PATH: self._load,
            STATE_PATH: self._state,
            READY_PATH: self._welcome,
            TASKS_PATH: self._registry.listed,
        }

    def server(self) -> web.Server:
        """A server of these addresses."""
        return web.Server(self.answer, access_log=None)

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Answer a question."""
        by = ""
        if request.path.startswith(f"{TASKS_PATH}/"):
            response, by = await self._registry.changed(request)
        else:
            response = await self._answer(request)
        call = AdminCall(request.method, request.path, request.remote or "", response.status, by)
        line = self._audit.line(call, time.time())
        if line is not None:
            log.info(line)
        return response

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        route = self._routes.get(request.path.rstrip("/"))
        if route is None:
            return json_response({"error": f"nothing here; this port has {', '.join(self._routes)}"}, 404)
        if request.method not in {"GET", "HEAD"}:
            return json_response({"error": f"{request.path} is only read: use GET"}, 405)
        return await route(request)

    async def _live(self, _: web.BaseRequest) -> web.Response:
        return json_response({"live": True, "ready": self._router.ready})

    async def _ready(self, _: web.BaseRequest) -> web.Response:
        ready = self._router.ready
        return json_response({"live": True, "ready": ready}, 200 if ready else 503)

    async def _metrics(self, _: web.BaseRequest) -> web.Response:
        await self._catch_up()
        body = []
        for family in self._router.metrics.families():
            body.append(family)
            await asyncio.sleep(0)
        return web.Response(body=b"".join(body), headers={"Content-Type": _METRICS_TYPE})

    async def _load(self, request: web.BaseRequest) -> web.Response:
        seconds = request.query.get("seconds", str(HISTORY_SECONDS))
        if not (seconds.isascii() and seconds.isdigit() and len(seconds) <= 9 and int(seconds) > 0):
            return json_response({"error": f"seconds={seconds[:20]}: expected a whole number of at least 1"}, 400)
        await self._catch_up()
        return _told(self._router.load(int(seconds)))

    async def _state(self, _: web.BaseRequest) -> web.Response:
        await self._catch_up()
        return _told(self._router.state())

    async def _welcome(self, _: web.BaseRequest) -> web.Response:
        welcome = self._router.accepts_traffic
        return json_response({"welcome": welcome}, 200 if welcome else 503)


def _told(content: StateModel) -> web.Response:
    return web.Response(body=content.model_dump_json().encode(), content_type="application/json")
