"""`RestIngress`: the V2 protocol over REST, `/v2/…`, with JSON and binary tensors.

A large body is refused by its Content-Length. The bound on JSON is lower: parsed numbers need many times their size.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web

from trimtab_protocol import Buffer, InferResponse, PendingRequest, ProtocolError, rest
from trimtab_router.admission.memory_budget import Reservation
from trimtab_router.admission.request_parsing import check_model
from trimtab_router.ingress import EXTENSIONS, SERVER_NAME, SERVER_VERSION, model_metadata
from trimtab_router.ingress.base import (
    V2Ingress,
    WholeResponse,
    error_response,
    health_response,
    json_response,
    require_timely_read,
)
from trimtab_router.ingress.request_body import read_body, too_large
from trimtab_router.refusal import Refusal, invalid
from trimtab_router.request import Call
from trimtab_router.router import Router

_MODEL_PATH = re.compile(r"^/v2/models/([^/]+)(?:/versions/([^/]+))?(/ready|/infer)?/?$")
_WRITE_BYTES = 2**20
JSON_BYTES_A_NUMBER = 16  # bytes that a number of a response counts against the bound on JSON
_USE_BINARY = "use binary tensors (extension binary_tensor_data)"


class RestIngress(V2Ingress):
    """HTTP handler of the V2 protocol."""

    def __init__(self, router: Router) -> None:
        super().__init__(router)
        self._max_json_bytes = router.limits.json_bytes
        self._server_routes: dict[str, Callable[[web.BaseRequest], web.Response]] = {
            "/v2": self._metadata,
            "/v2/health/live": lambda _: health_response(router, live=True),
            "/v2/health/ready": lambda _: health_response(router, live=False),
        }

    def refuse(self, request: web.BaseRequest, refusal: Refusal) -> web.Response:
        return error_response(request, refusal, {"error": refusal.message})

    async def route(self, request: web.BaseRequest) -> web.StreamResponse:
        match = _MODEL_PATH.match(request.path)
        if match is None:
            return self._server_route(request)
        name, version, action = match[1], match[2] or "", match[3]
        if action == "/infer":
            if request.method != "POST":
                refusal = Refusal("MethodNotAllowed", f"{request.method} {request.path}: infer takes POST")
                raise self._router.accounting.count_rejection(refusal)
            return await self.infer(request, partial(self._read, request, name, version))
        check_model(self._router.pipeline.name, name, version)
        if action == "/ready":
            ready = self._router.ready
            return json_response({"name": name, "ready": ready, "live": True}, 200 if ready else 503)
        return json_response(model_metadata(self._router.pipeline))

    def _server_route(self, request: web.BaseRequest) -> web.Response:
        route = self._server_routes.get(request.path.rstrip("/"))
        if route is None:
            message = f"unknown path {request.path}; try /v2/models/{self._router.pipeline.name}/infer"
            refusal = Refusal("NotFound", message)
            raise self._router.accounting.count_rejection(refusal)
        return route(request)

    def _metadata(self, _: web.BaseRequest) -> web.Response:
        return json_response({"name": SERVER_NAME, "version": SERVER_VERSION, "extensions": list(EXTENSIONS)})

    async def _read(
        self, request: web.BaseRequest, name: str, version: str, reservation: Reservation
    ) -> PendingRequest:
        check_model(self._router.pipeline.name, name, version)
        limits, uploads = self._router.limits, self._router.admission.uploads
        header_length = request.headers.get(rest.HEADER_LENGTH)
        if header_length is None:
            body = await read_body(request, reservation, self._max_json_bytes, uploads, _USE_BINARY)
        else:
            json_bytes = rest.json_bytes(header_length, limits.max_payload_bytes)
            if json_bytes > self._max_json_bytes:
                raise too_large(f"{json_bytes} bytes of the body are JSON", self._max_json_bytes, _USE_BINARY)
            body = await read_body(request, reservation, limits.max_payload_bytes, uploads)
            return rest.read_request(name, body, json_bytes, model_version=version)
        return rest.read_request(name, body, None, model_version=version)

    def encode(self, call: Call, response: InferResponse) -> tuple[list[Buffer], dict[str, str]]:
        max_numbers = self._router.limits.max_json_bytes // JSON_BYTES_A_NUMBER
        try:
            binary = rest.binary_outputs(call.request, response.outputs)
            numbers = 0
            for output in response.outputs:
                if output.name not in binary:
                    numbers += output.array.size
            if numbers > max_numbers:
                raise invalid(
                    f"the response has {numbers} numbers, and JSON at most {max_numbers}; request binary data"
                )
            buffers, header_length = rest.encode_response(response, binary)
        except ProtocolError as error:
            raise invalid(str(error)) from error
        headers = {"Content-Type": rest.JSON_CONTENT_TYPE}
        if header_length is not None:
            headers = {"Content-Type": rest.BINARY_CONTENT_TYPE, rest.HEADER_LENGTH: str(header_length)}
        if call.request_id:
            headers["x-request-id"] = call.request_id
        return buffers, headers

    def whole(self, buffers: Sequence[Buffer], headers: dict[str, str]) -> web.StreamResponse:
        return WholeResponse(buffers, "".join([f"{name}: {value}\r\n" for name, value in headers.items()]))

    async def send(
        self, request: web.BaseRequest, buffers: Sequence[Buffer], headers: dict[str, str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=headers)
        response.content_length = sum(map(len, buffers))
        await response.prepare(request)
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            for start in range(0, view.nbytes, _WRITE_BYTES):
                await require_timely_read(request, response.write(view[start : start + _WRITE_BYTES]))
        await response.write_eof()
        return response
