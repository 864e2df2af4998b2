"""REST front door: `/v2/…` with JSON and binary tensors.

A body that cannot be served is refused by its Content-Length, before it is read.
"""

import json
import logging
import re
import time
from collections.abc import Callable

from aiohttp import web

from trimtab_protocol import InferResponse, ProtocolError, rest
from trimtab_router.admission import check_model
from trimtab_router.ingress import EXTENSIONS, SERVER_NAME, SERVER_VERSION, model_metadata
from trimtab_router.refusal import Code, Refusal, invalid, malformed
from trimtab_router.router import Call, Router

log = logging.getLogger(__name__)

_MODEL_PATH = re.compile(r"^/v2/models/([^/]+)(?:/versions/([^/]+))?(/ready|/infer)?/?$")


class RestIngress:
    """The HTTP handler, over a router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._server_routes: dict[str, Callable[[web.BaseRequest], web.Response]] = {
            "/v2": self._metadata,
            "/v2/health/live": self._live,
            "/v2/health/ready": self._ready,
        }

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Serve a request."""
        response = await self._response(request)
        if self._router.leaving:
            response.force_close()  # so that the caller's next request finds another router
        return response

    async def _response(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._route(request)
        except Refusal as refusal:
            return _refused(request, refusal)
        except web.HTTPException as error:
            return _json({"error": error.text or error.reason}, error.status)
        except Exception as error:
            log.exception("%s %s failed", request.method, request.path)
            return _json({"error": f"{type(error).__name__}: {error}"}, 500)

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        match = _MODEL_PATH.match(request.path)
        if match is None:
            return self._server_route(request)
        name, version, action = match[1], match[2] or "", match[3]
        if action == "/infer":
            if request.method != "POST":
                return _json({"error": f"{request.method} {request.path}: infer takes POST"}, 405)
            return await self._infer(request, name, version)
        check_model(self._router.pipeline.name, name, version)
        if action == "/ready":
            ready = self._router.ready
            return _json({"name": name, "ready": ready, "live": True}, 200 if ready else 503)
        return _json(model_metadata(self._router.pipeline))

    def _server_route(self, request: web.BaseRequest) -> web.Response:
        route = self._server_routes.get(request.path.rstrip("/"))
        if route is None:
            return _json(
                {"error": f"nothing at {request.path}; try /v2/models/{self._router.pipeline.name}/infer"}, 404
            )
        return route(request)

    def _metadata(self, _: web.BaseRequest) -> web.Response:
        return _json({"name": SERVER_NAME, "version": SERVER_VERSION, "extensions": list(EXTENSIONS)})

    def _live(self, _: web.BaseRequest) -> web.Response:
        return _json({"live": True, "ready": self._router.ready})

    def _ready(self, _: web.BaseRequest) -> web.Response:
        ready = self._router.ready
        return _json({"live": True, "ready": ready}, 200 if ready else 503)

    async def _infer(self, request: web.BaseRequest, name: str, version: str) -> web.Response:
        router, length, arrived_at = self._router, request.content_length or 0, time.monotonic()
        await router.enter(arrived_at)
        try:
            self._check_length(length)
            reservation = router.reserve(length)
        except Refusal as refusal:
            raise router.turn_away(refusal) from refusal
        with reservation:
            body = await self._read(request)
            try:
                unforeseen = router.reserve(max(len(body) - length, 0))  # sent in chunks, or compressed
            except Refusal as refusal:
                raise router.turn_away(refusal) from refusal
            with unforeseen:
                call = self._parse(request, arrived_at, body, name, version)
                return _answered(call, await router.infer(call))

    async def _read(self, request: web.BaseRequest) -> bytes:
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            return await request.read()
        except web.RequestPayloadError as error:
            raise self._router.turn_away(invalid(f"the body cannot be read: {error}")) from error
        except web.HTTPRequestEntityTooLarge as error:
            raise self._router.turn_away(self._too_large(error.text or "")) from error

    def _parse(self, request: web.BaseRequest, arrived_at: float, body: bytes, name: str, version: str) -> Call:
        headers = request.headers
        try:
            parsed = rest.decode_request(name, body, headers.get(rest.HEADER_LENGTH), model_version=version)
        except ProtocolError as error:
            raise self._router.turn_away(malformed(error)) from error
        return Call(
            parsed, arrived_at, request_id=headers.get("x-request-id", ""), trace_parent=headers.get("traceparent", "")
        )

    def _check_length(self, length: int) -> None:
        if length > self._router.limits.max_payload_bytes:
            raise self._too_large(f"the body has {length} bytes")

    def _too_large(self, what: str) -> Refusal:
        message = f"{what}; at most {self._router.limits.max_payload_bytes} bytes are taken"
        return Refusal(Code.PAYLOAD_TOO_LARGE, "PayloadTooLarge", message)


def _answered(call: Call, response: InferResponse) -> web.Response:
    try:
        buffers, header_length = rest.encode_response(response, rest.binary_outputs(call.request, response.outputs))
    except ProtocolError as error:
        raise malformed(error) from error
    headers = {"Content-Type": rest.JSON_CONTENT_TYPE if header_length is None else rest.BINARY_CONTENT_TYPE}
    if header_length is not None:
        headers[rest.HEADER_LENGTH] = str(header_length)
    if call.request_id:
        headers["x-request-id"] = call.request_id
    return web.Response(body=b"".join(buffers), headers=headers)


def _json(content: object, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(content).encode(), status=status, content_type=rest.JSON_CONTENT_TYPE)


def _refused(request: web.BaseRequest, refusal: Refusal) -> web.Response:
    response = web.Response(
        body=rest.error_body(refusal.message), status=refusal.code.value, content_type=rest.JSON_CONTENT_TYPE
    )
    response.headers["x-trimtab-reason"] = refusal.reason
    if refusal.stage:
        response.headers["x-trimtab-stage"] = refusal.stage
    if refusal.retry_after_seconds is not None:
        response.headers["Retry-After"] = str(max(1, round(refusal.retry_after_seconds)))
    if not request.content.is_eof():
        response.force_close()  # the rest of the body is not worth reading
    return response
