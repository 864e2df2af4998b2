"""REST front door: `/v2/…` with JSON and binary tensors.

A body that cannot be served is refused by its Content-Length, before it is read; one of JSON beyond a bound of its own,
since numbers in JSON cost many times their size.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web

from trimtab_protocol import Buffer, InferResponse, ProtocolError, rest
from trimtab_protocol.extensions import REASON_HEADER, STAGE_HEADER
from trimtab_protocol.sanitize import printable
from trimtab_router.admission.call import Call
from trimtab_router.admission.memory_budget import Reservation
from trimtab_router.admission.validation import check_model
from trimtab_router.ingress import EXTENSIONS, SERVER_NAME, SERVER_VERSION, model_metadata
from trimtab_router.ingress.request_body import read_body, too_large
from trimtab_router.ingress.request_parsing import ParsedHeader, client, client_disconnected, parse_call, request_id
from trimtab_router.ingress.slow_reader import require_timely_read
from trimtab_router.refusal import Refusal, failure, malformed, not_found, wrong_method
from trimtab_router.router import Router

log = logging.getLogger(__name__)

_MODEL_PATH = re.compile(r"^/v2/models/([^/]+)(?:/versions/([^/]+))?(/ready|/infer)?/?$")
_JOIN_BELOW_BYTES = 64 * 2**10
"""Answers up to this size go out as one buffer; copying them costs less than another write."""
_WRITTEN_BYTES = 2**20
JSON_BYTES_A_NUMBER = 16
"""What a number of an answer counts of the bound on JSON: about as it is written, within some tens of milliseconds."""
_USE_BINARY = "use binary tensors (extension binary_tensor_data)"


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
        except ConnectionError:
            raise
        except web.HTTPException as error:
            return _json({"error": error.text or error.reason}, error.status)
        except Exception:
            log.exception("%s %s failed", printable(request.method, 100), printable(request.path, 200))
            return _refused(request, failure("InternalError", "the request failed", request_id(request)))

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        match = _MODEL_PATH.match(request.path)
        if match is None:
            return self._server_route(request)
        name, version, action = match[1], match[2] or "", match[3]
        if action == "/infer":
            if request.method != "POST":
                refusal = wrong_method(f"{request.method} {request.path}: infer takes POST")
                raise self._router.accounts.turned_away(refusal)
            return await self._infer(request, name, version)
        check_model(self._router.pipeline.name, name, version)
        if action == "/ready":
            ready = self._router.ready
            return _json({"name": name, "ready": ready, "live": True}, 200 if ready else 503)
        return _json(model_metadata(self._router.pipeline))

    def _server_route(self, request: web.BaseRequest) -> web.Response:
        route = self._server_routes.get(request.path.rstrip("/"))
        if route is None:
            refusal = not_found(f"nothing at {request.path}; try /v2/models/{self._router.pipeline.name}/infer")
            raise self._router.accounts.turned_away(refusal)
        return route(request)

    def _metadata(self, _: web.BaseRequest) -> web.Response:
        return _json({"name": SERVER_NAME, "version": SERVER_VERSION, "extensions": list(EXTENSIONS)})

    def _live(self, _: web.BaseRequest) -> web.Response:
        return _json({"live": True, "ready": self._router.ready})

    def _ready(self, _: web.BaseRequest) -> web.Response:
        ready = self._router.ready
        return _json({"live": True, "ready": ready}, 200 if ready else 503)

    async def _infer(self, request: web.BaseRequest, name: str, version: str) -> web.StreamResponse:
        router, arrived_at = self._router, time.monotonic()
        describe = partial(self._describe, request, name, version)
        with await router.admit(arrived_at, client(request)) as reservation:
            call = await parse_call(router, request, reservation, arrived_at, describe)
            response = await router.infer(call)
            reservation.answered()
            buffers, headers = self._encode(call, response)
            del call, response  # while the answer waits for its reader it is all there is
            reservation.deliver(sum(map(_size, buffers)), partial(client_disconnected, request))
            return await _send(request, buffers, headers)

    async def _describe(
        self, request: web.BaseRequest, name: str, version: str, reservation: Reservation
    ) -> ParsedHeader:
        check_model(self._router.pipeline.name, name, version)
        written = request.headers.get(rest.HEADER_LENGTH)
        body = await self._read_body(request, reservation, written)
        return ParsedHeader(rest.read_request(name, body, written, model_version=version))

    async def _read_body(
        self, request: web.BaseRequest, reservation: Reservation, header_length: str | None
    ) -> memoryview:
        """The body: all JSON, or as much of it as its header says."""
        limits, seconds = self._router.limits, self._router.body_seconds
        if header_length is None:
            return await read_body(request, reservation, limits.json_bytes, seconds, _USE_BINARY)
        written = rest.json_bytes(header_length, limits.max_payload_bytes)
        if written > limits.json_bytes:
            raise too_large(f"{written} bytes of the body are JSON", limits.json_bytes, _USE_BINARY)
        return await read_body(request, reservation, limits.max_payload_bytes, seconds)

    def _encode(self, call: Call, response: InferResponse) -> tuple[list[Buffer], dict[str, str]]:
        try:
            return _encoded(call, response, self._router.limits.max_json_bytes // JSON_BYTES_A_NUMBER)
        except ProtocolError as error:
            raise malformed(error) from error


def _encoded(call: Call, response: InferResponse, most_numbers: int) -> tuple[list[Buffer], dict[str, str]]:
    binary = rest.binary_outputs(call.request, response.outputs)
    numbers = sum(output.array.size for output in response.outputs if output.name not in binary)
    if numbers > most_numbers:
        message = f"the answer has {numbers} numbers, of which JSON takes at most {most_numbers}; ask for binary data"
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
        for begins in range(0, view.nbytes, _WRITTEN_BYTES):
            await require_timely_read(request, response.write(view[begins : begins + _WRITTEN_BYTES]))
    await response.write_eof()
    return response


def _size(buffer: Buffer) -> int:
    return memoryview(buffer).nbytes


def _json(content: object, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(content).encode(), status=status, content_type=rest.JSON_CONTENT_TYPE)


def _refused(request: web.BaseRequest, refusal: Refusal) -> web.Response:
    response = web.Response(
        body=rest.error_body(refusal.message), status=refusal.code.value, content_type=rest.JSON_CONTENT_TYPE
    )
    response.headers[REASON_HEADER] = refusal.reason
    if refusal.stage:
        response.headers[STAGE_HEADER] = refusal.stage
    if refusal.retry_after_seconds is not None:
        response.headers["Retry-After"] = str(max(1, round(refusal.retry_after_seconds)))
    if not request.content.is_eof():
        response.force_close()  # the rest of the body is not worth reading
    return response
