"""`DataPort`: Open Inference Protocol V2 over HTTP with binary tensors, next to MLServer's own ports.

MLServer creates a Python object for every number of a tensor. The data port reads a tensor from the socket into a
buffer that torch computes on, and writes it from torch's memory to the socket. Both serve the same models.
"""

import asyncio
import json
import logging
import re
import ssl
import time
from collections.abc import Sequence

import numpy as np
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from trimtab_model_servers.errors import RefusalError
from trimtab_model_servers.model_protocol import metadata_of
from trimtab_model_servers.server import chat_routes
from trimtab_model_servers.server.chat_metrics import CachedExposition, exposition
from trimtab_model_servers.server.model_registry import ModelRegistry
from trimtab_pipelines.model_spec import MAX_BODY_BYTES
from trimtab_protocol import Buffer, ProtocolError, rest
from trimtab_protocol.event_loop import LagMonitor, start_service
from trimtab_protocol.host_check import HostCheck
from trimtab_protocol.mutual_tls import MutualTls
from trimtab_protocol.rest import HEADER_LENGTH, JSON_CONTENT_TYPE
from trimtab_protocol.sanitize import printable

log = logging.getLogger(__name__)
_MODEL_PATH = re.compile(
    r"^/v2/models/([^/]+)(?:/versions/[^/]+)?(/infer|/ready|/generate_stream|/count|/pending"
    r"|/(?:embeddings|references)/[^/]{1,256})?$"
)
_INFER_ACTIONS = frozenset({"/infer", "/generate_stream", "/count"})
_ALIGNMENT_BYTES = 64
_CLIENT_CLOSED_REQUEST = 499
"""Status after a client has disconnected; re-raised, the exception would be logged as a server error."""
_JOIN_BELOW_BYTES = 64 * 2**10


class DataPort:
    """An HTTP server over the models of a process; bodies above ``max_body_bytes`` are rejected with 413."""

    def __init__(self, models: ModelRegistry, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._models = models
        self._max_body_bytes = max_body_bytes
        self._lag = LagMonitor()
        self._lag_watch: asyncio.Task[None] | None = None
        self._metrics = CachedExposition(self._exposition)
        self._runners: list[web.ServerRunner] = []
        self._host_check = HostCheck()
        self.port = 0

    async def start(self, address: str, port: int, identity: MutualTls | None = None) -> int:
        """Listen, with an identity only for clients with a certificate; return the port, chosen by the system if 0."""
        server = web.Server(self._answer, handler_cancellation=True, access_log=None, auto_decompress=False)
        tls = None if identity is None else identity.server_context()
        self._host_check = HostCheck.at(address)
        self.port = await self._listen(server, address, port, tls)
        self._lag_watch = start_service("measurement of the event loop's lag", self._lag.watch)
        return self.port

    async def serve_health(self, address: str, port: int) -> int:
        """Serve only health on a plain HTTP port; return the port."""
        return await self._listen(web.Server(self._answer_health, access_log=None), address, port)

    async def serve_metrics(self, address: str, port: int) -> int:
        """Serve only metrics on a plain HTTP port; return the port."""
        return await self._listen(web.Server(self._answer_metrics, access_log=None), address, port)

    async def stop(self) -> None:
        """Close the ports once the responses in progress are written."""
        if self._lag_watch is not None:
            self._lag_watch.cancel()
        while self._runners:
            await self._runners.pop().cleanup()

    def _exposition(self) -> bytes:
        return exposition(self._models.models, self._lag.seconds)

    async def _listen(self, server: web.Server, address: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        runner = web.ServerRunner(server, shutdown_timeout=5.0)
        self._runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, address, port, backlog=1024, ssl_context=tls).start()
        return int(runner.addresses[0][1])

    async def _answer_health(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer the kubelet, which has no client certificate."""
        if request.path not in {"/v2/health/live", "/v2/health/ready"}:
            return _error(request, 404, f"nothing at {printable(request.path, 200)}; this port serves only health")
        return self._server_route(request)

    async def _answer_metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer scrapes, at most one rendering a second, and close each connection."""
        if request.path == "/metrics" and request.method == "GET":
            text = self._metrics.at(time.monotonic())
            response = web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})
        else:
            response = _error(request, 404, f"nothing at {printable(request.path, 200)}; this port serves GET /metrics")
        response.force_close()
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if not self._host_check.accepts(request.headers):
            return _error(request, 403, "on loopback only requests for 127.0.0.1, localhost or [::1] are accepted")
        try:
            return await self._route(request)
        except RefusalError as refusal:
            return _error(request, refusal.status_code, str(refusal))
        except ProtocolError as error:
            return _error(request, 400, str(error))
        except Exception as error:
            if isinstance(error, ConnectionError) and (request.transport is None or request.transport.is_closing()):
                return web.Response(status=_CLIENT_CLOSED_REQUEST)
            log.exception("%s %s failed", request.method, printable(request.path, 200))
            return _error(request, 500, f"{type(error).__name__}: {error}")

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        match = _MODEL_PATH.match(request.path)
        if match is None:
            return self._server_route(request)
        name, action = match.groups()
        if action in _INFER_ACTIONS:
            if request.method != "POST":
                raise RefusalError(405, f"{request.method} {request.path}: {action[1:]} takes POST")
            return await self._infer(request, name, action)
        model = self._models.model(name)
        if action is None:
            return _json(metadata_of(model.spec, model.facts()))
        if action == "/pending":
            return _json(chat_routes.pending(model, name))
        if action.startswith(("/embeddings/", "/references/")):
            _, kind, key = action.split("/")
            route = chat_routes.embeddings if kind == "embeddings" else chat_routes.references
            return await route(request, model, name, key)
        return self._answer_readiness(name)

    def _server_route(self, request: web.BaseRequest) -> web.StreamResponse:
        match request.path:
            case "/v2/health/live":
                return _json({"live": True})
            case "/v2/health/ready":
                ready = self._models.ready
                return _json({"live": ready, "ready": ready}, 200 if ready else 503)
            case "/metrics":
                return web.Response(body=self._exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})
            case "/v2":
                return _json({"name": "trimtab", "version": "2", "extensions": ["binary_tensor_data"]})
        raise RefusalError(404, f"nothing at {request.path}; try /v2/models/NAME/infer")

    def _answer_readiness(self, name: str) -> web.Response:
        """Answer routers; a reason means that the replica serves, but should get no new requests if others can."""
        reason = self._lag.readiness.reason if self._models.serving else ""
        ready = self._models.serving and not reason
        return _json({"name": name, "ready": ready} | ({"reason": reason} if reason else {}), 200 if ready else 503)

    async def _infer(self, request: web.BaseRequest, name: str, action: str) -> web.StreamResponse:
        model = self._models.model(name)
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        header_length = request.headers.get(HEADER_LENGTH)
        body = await _read_body(request, _header_bytes(header_length), self._max_body_bytes)
        infer_request = rest.decode_request(name, body, header_length)
        try:
            if action == "/count":
                return _json(await chat_routes.count(model, infer_request))
            if action == "/generate_stream":
                return await chat_routes.stream(request, model, infer_request, self._models.worker)
            infer_response = await model.infer(infer_request, self._models.worker)
        except RefusalError as refusal:
            return _error(request, refusal.status_code, str(refusal), infer_request.id)
        outputs = rest.binary_outputs(infer_request, infer_response.outputs)
        buffers, length = rest.encode_response(infer_response, outputs)
        return await _send(request, buffers, length)


def _header_bytes(header: str | None) -> int:
    try:
        return rest.json_bytes(header, MAX_BODY_BYTES) if header else 0
    except ProtocolError:
        return 0  # rejected after the body has been read


async def _read_body(request: web.BaseRequest, header_bytes: int, max_bytes: int) -> memoryview:
    """Read a body; its part after `header_bytes` is aligned, so that tensors need no copy. Raises RefusalError."""
    length = request.content_length
    if length is None:
        return await _read_unknown_length(request, max_bytes)
    if length > max_bytes:
        raise _too_large(length, max_bytes)
    buffer = np.empty(length + _ALIGNMENT_BYTES, np.uint8)
    offset = -(buffer.ctypes.data + header_bytes) % _ALIGNMENT_BYTES
    body = buffer.data[offset : offset + length]
    position = 0
    while chunk := await request.content.readany():
        body[position : position + len(chunk)] = chunk
        position += len(chunk)
    if position != length:
        raise RefusalError(400, f"the body ended after {position} of its {length} bytes")
    return body


async def _read_unknown_length(request: web.BaseRequest, max_bytes: int) -> memoryview:
    body = bytearray()
    while chunk := await request.content.readany():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(len(body), max_bytes)
    return memoryview(body)


def _too_large(length: int, max_bytes: int) -> RefusalError:
    return RefusalError(413, f"a body of {length} bytes is too large; send at most {max_bytes} bytes")


async def _send(request: web.BaseRequest, buffers: Sequence[Buffer], header_length: int | None) -> web.StreamResponse:
    headers = {"Content-Type": rest.BINARY_CONTENT_TYPE if header_length else JSON_CONTENT_TYPE}
    if header_length is not None:
        headers[HEADER_LENGTH] = str(header_length)
    return await chat_routes.send_buffers(request, buffers, headers, join_below_bytes=_JOIN_BELOW_BYTES)


def _json(content: object, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(content).encode(), status=status, content_type=JSON_CONTENT_TYPE)


def _error(request: web.BaseRequest, status: int, message: str, request_id: str = "") -> web.Response:
    """An error response, with the id of its request."""
    body = rest.error_body(printable(message), request_id)
    response = web.Response(body=body, status=status, content_type=JSON_CONTENT_TYPE)
    if not request.content.is_eof():
        response.force_close()  # the rest of the body is not read
    return response
