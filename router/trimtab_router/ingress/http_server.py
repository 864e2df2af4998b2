"""`HttpServer`: HTTP/1.1 server of requests, over REST, OpenAI's API, and gRPC as Envoy forwards it."""

import asyncio
from typing import Any

from aiohttp import web

from trimtab_router.ingress import grpc
from trimtab_router.ingress.openai import PREFIX, OpenAiIngress
from trimtab_router.ingress.rest import RestIngress
from trimtab_router.router import Router


class HttpServer:
    """HTTP handler of requests.

    Args:
        router: the router.
        serves_grpc: whether clients connect through Envoy, which turns HTTP/1.1 trailers into gRPC's.
    """

    def __init__(self, router: Router, *, serves_grpc: bool) -> None:
        self._router = router
        self._rest = RestIngress(router)
        self._openai = OpenAiIngress(router)
        self._grpc = grpc.GrpcIngress(router) if serves_grpc else None

    def server(self) -> web.Server:
        """Server that cancels a request when its client disconnects."""
        return web.Server(
            self._respond,
            request_factory=self._make_request,
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
        )

    def _make_request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        loop, limit = asyncio.get_running_loop(), self._router.limits.max_payload_bytes
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=limit)

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        if self._grpc is not None and grpc.is_call(request):
            return await self._grpc.answer(request)
        if request.path.startswith(PREFIX):
            return await self._openai.answer(request)
        return await self._rest.answer(request)
