"""`RestIngress`: the V2 protocol over REST, `/v2/…`, with JSON and binary tensors.

A body that is too large is refused by its Content-Length, before it is read. JSON has a lower bound, because parsed
numbers need many times their size.
"""

import logging
import re
import time
from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web

from trimtab_protocol import Buffer, InferResponse, ProtocolError, rest
from trimtab_router.admission.call import Call
from trimtab_router.admission.memory_budget import Reservation
from trimtab_router.admission.validation import check_model
from trimtab_router.ingress import EXTENSIONS, SERVER_NAME, SERVER_VERSION, model_metadata
from trimtab_router.ingress.base import HttpIngress, json_response, require_timely_read
from trimtab_router.ingress.request_body import read_body, too_large
from trimtab_router.ingress.request_parsing import (
    ParsedHeader,
    abort_connection,
    parse_call,
    request_client,
)
from trimtab_router.refusal import Refusal, malformed, not_found, wrong_method
from trimtab_router.router import Router

log = logging.getLogger(__name__)

_MODEL_PATH = re.compile(r"^/v2/models/([^/]+)(?:/versions/([^/]+))?(/ready|/infer)?/?$")
_JOIN_BELOW_BYTES = 64 * 2**10
"""Responses up to this size are sent as one buffer. Copying them costs less than another write."""
_WRITE_BYTES = 2**20
JSON_BYTES_A_NUMBER = 16
"""Bytes that a number of a response counts against the bound on JSON."""
_USE_BINARY = "use binary tensors (extension binary_tensor_data)"


class RestIngress(HttpIngress):
    """HTTP handler of the V2 protocol."""

    def __init__(self, router: Router) -> None:
        super().__init__(router)
        self._server_routes: dict[str, Callable[[web.BaseRequest], web.Response]] = {
            "/v2": self._metadata,
            "/v2/health/live": self._live,
            "/v2/health/ready": self._ready,
        }

    def error_body(self, refusal: Refusal) -> object:
        return {"error": refusal.message}

    def http_error_body(self, status: int, message: str) -> object:  # noqa: ARG002 - OpenAI's form has it
        return {"error": message}

    async def route(self, request: web.BaseRequest) -> web.StreamResponse:
        match = _MODEL_PATH.match(request.path)
        if match is None:
            return self._server_route(request)
        name, version, action = match[1], match[2] or "", match[3]
        if action == "/infer":
            if request.method != "POST":
                refusal = wrong_method(f"{request.method} {request.path}: infer takes POST")
                raise self._router.accounting.count_rejection(refusal)
            return await self._infer(request, name, version)
        check_model(self._router.pipeline.name, name, version)
        if action == "/ready":
            ready = self._router.ready
            return json_response({"name": name, "ready": ready, "live": True}, 200 if ready else 503)
        return json_response(model_metadata(self._router.pipeline))

    def _server_route(self, request: web.BaseRequest) -> web.Response:
        route = self._server_routes.get(request.path.rstrip("/"))
        if route is None:
            refusal = not_found(f"unknown path {request.path}; try /v2/models/{self._router.pipeline.name}/infer")
            raise self._router.accounting.count_rejection(refusal)
        return route(request)

    def _metadata(self, _: web.BaseRequest) -> web.Response:
        return json_response({"name": SERVER_NAME, "version": SERVER_VERSION, "extensions": list(EXTENSIONS)})

    def _live(self, _: web.BaseRequest) -> web.Response:
        return json_response({"live": True, "ready": self._router.ready})

    def _ready(self, _: web.BaseRequest) -> web.Response:
        ready = self._router.ready
        return json_response({"live": True, "ready": ready}, 200 if ready else 503)

    async def _infer(self, request: web.BaseRequest, name: str, version: str) -> web.StreamResponse:
        router, arrived_at = self._router, time.monotonic()
        read_header = partial(self._read_header, request, name, version)
        with await router.admit(arrived_at, request_client(request)) as reservation:
            call = await parse_call(router, request, reservation, arrived_at, read_header)
            response = await router.infer(call)
            reservation.mark_served()
            buffers, headers = self._encode(call, response)
            del call, response  # free the request while its response waits for the reader
            reservation.hold_response(sum(map(_size, buffers)), partial(abort_connection, request))
            return await _send(request, buffers, headers)

    async def _read_header(
        self, request: web.BaseRequest, name: str, version: str, reservation: Reservation
    ) -> ParsedHeader:
        check_model(self._router.pipeline.name, name, version)
        header_length = request.headers.get(rest.HEADER_LENGTH)
        body = await self._read_body(request, reservation, header_length)
        return ParsedHeader(rest.read_request(name, body, header_length, model_version=version))

    async def _read_body(
        self, request: web.BaseRequest, reservation: Reservation, header_length: str | None
    ) -> memoryview:
        """Read the body: all JSON, or JSON followed by binary tensors."""
        limits, seconds = self._router.limits, self._router.body_seconds
        if header_length is None:
            return await read_body(request, reservation, limits.json_bytes, seconds, _USE_BINARY)
        json_bytes = rest.json_bytes(header_length, limits.max_payload_bytes)
        if json_bytes > limits.json_bytes:
            raise too_large(f"{json_bytes} bytes of the body are JSON", limits.json_bytes, _USE_BINARY)
        return await read_body(request, reservation, limits.max_payload_bytes, seconds)

    def _encode(self, call: Call, response: InferResponse) -> tuple[list[Buffer], dict[str, str]]:
        try:
            return _encode_response(call, response, self._router.limits.max_json_bytes // JSON_BYTES_A_NUMBER)
        except ProtocolError as error:
            raise malformed(error) from error


def _encode_response(call: Call, response: InferResponse, max_numbers: int) -> tuple[list[Buffer], dict[str, str]]:
    binary = rest.binary_outputs(call.request, response.outputs)
    numbers = sum(output.array.size for output in response.outputs if output.name not in binary)
    if numbers > max_numbers:
        message = f"the response has {numbers} numbers, and JSON at most {max_numbers}; request binary data"
        raise ProtocolError(message)
    buffers, header_length = rest.encode_response(response, binary)
    headers = {"Content-Type": rest.JSON_CONTENT_TYPE if header_length is None else rest.BINARY_CONTENT_TYPE}
    if header_length is not None:
        headers[rest.HEADER_LENGTH] = str(header_length)
    if call.request_id:
        headers["x-request-id"] = call.request_id
    return buffers, headers


async def _send(request: web.BaseRequest, buffers: Sequence[Buffer], headers: dict[str, str]) -> web.StreamResponse:
    total = sum(map(_size, buffers))
    if total <= _JOIN_BELOW_BYTES:
        return web.Response(body=b"".join(buffers), headers=headers)
    response = web.StreamResponse(headers=headers)
    response.content_length = total
    await response.prepare(request)
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        for start in range(0, view.nbytes, _WRITE_BYTES):
            await require_timely_read(request, response.write(view[start : start + _WRITE_BYTES]))
    await response.write_eof()
    return response


def _size(buffer: Buffer) -> int:
    return memoryview(buffer).nbytes
