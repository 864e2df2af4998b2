"""Where requests come in: one HTTP/1.1 server for REST and for gRPC as the door passes it on."""

import asyncio
from typing import Any

from aiohttp import web

from trimtab_router.ingress import grpc
from trimtab_router.ingress.openai import PREFIX, OpenAiIngress
from trimtab_router.ingress.rest import RestIngress
from trimtab_router.router import Router


class HttpServer:
    """The HTTP handler of requests, over a router.

    Args:
        router: the router.
        speaks_grpc: whether whoever connects is a door that turns our HTTP/1.1 trailers into gRPC's.
    """

    def __init__(self, router: Router, *, speaks_grpc: bool) -> None:
        self._router = router
        self._rest = RestIngress(router)
        self._openai = OpenAiIngress(router)
        self._grpc = grpc.GrpcIngress(router) if speaks_grpc else None

    def server(self) -> web.Server:
        """A server that leaves a request as soon as its caller does."""
        return web.Server(
            self._answer,
            request_factory=self._make_request,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
        )

    def _make_request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        loop, limit = asyncio.get_running_loop(), self._router.limits.max_payload_bytes
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=limit)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._grpc is not None and grpc.is_call(request):
            return await self._grpc.answer(request)
        if request.path.startswith(PREFIX):
            return await self._openai.answer(request)
        return await self._rest.answer(request)
