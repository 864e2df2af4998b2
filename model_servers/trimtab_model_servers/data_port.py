"""The data port: Open Inference Protocol V2 over HTTP with binary tensors, beside MLServer's own ports.

MLServer makes a Python object of every number that crosses it. Here a tensor goes from the socket into one buffer that
torch computes on, and from torch's memory to the socket. Same models, same one batch at a time, same event loop.
"""

import json
import logging
import re
import ssl
import time
from collections.abc import Sequence

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from trimtab_model_servers import chat_routes
from trimtab_model_servers.chat_metrics import Page, exposition
from trimtab_model_servers.errors import RefusalError
from trimtab_model_servers.model_registry import ModelRegistry
from trimtab_model_servers.request_body import read_body
from trimtab_pipelines.model_spec import MAX_BODY_BYTES
from trimtab_protocol import Buffer, ProtocolError
from trimtab_protocol.mutual_tls import MutualTls
from trimtab_protocol.rest import (
    BINARY_CONTENT_TYPE,
    HEADER_LENGTH,
    JSON_CONTENT_TYPE,
    binary_outputs,
    decode_request,
    encode_response,
    error_body,
    json_bytes,
)
from trimtab_protocol.sanitize import printable

log = logging.getLogger(__name__)
_MODEL_PATH = re.compile(
    r"^/v2/models/([^/]+)(?:/versions/[^/]+)?(/infer|/ready|/generate_stream|/count|/pending"
    r"|/(?:embeddings|references)/[^/]{1,256})?$"
)
_TAKE_REQUESTS = frozenset({"/infer", "/generate_stream", "/count"})
_NOBODY_LEFT = 499
"""Who hung up is answered nothing; raised on, it would be a fault of ours in the log."""
_JOIN_BELOW_BYTES = 64 * 2**10
"""Answers up to this size go out as one buffer; copying them costs less than another write."""


class DataPort:
    """An HTTP server over the models of a host.

    Args:
        models: where to find them.
        max_body_bytes: larger requests are refused with 413.
    """

    def __init__(self, models: ModelRegistry, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._host = models
        self._max_body_bytes = max_body_bytes
        self._page = Page(lambda: exposition(models.models))
        self._runners: list[web.ServerRunner] = []
        self.port = 0

    async def start(self, address: str, port: int, identity: MutualTls | None = None) -> int:
        """Listen, with an identity only for who shows one; return the port, which the system chooses for 0."""
        server = web.Server(self._answer, handler_cancellation=True, access_log=None, auto_decompress=False)
        self.port = await self._listen(server, address, port, None if identity is None else identity.listening())
        return self.port

    async def tell_health(self, address: str, port: int) -> int:
        """Say on a plain port of its own whether it is alive and ready, and no more; return the port."""
        return await self._listen(web.Server(self._answer_health, access_log=None), address, port, None)

    async def tell_metrics(self, address: str, port: int) -> int:
        """Say on a plain port of its own what its chats hold and have done, and no more; return the port."""
        return await self._listen(web.Server(self._answer_metrics, access_log=None), address, port, None)

    async def stop(self) -> None:
        """Close the ports and their connections once their answers are written."""
        while self._runners:
            await self._runners.pop().cleanup()

    async def _listen(self, server: web.Server, address: str, port: int, tls: ssl.SSLContext | None) -> int:
        runner = web.ServerRunner(server, shutdown_timeout=5.0)
        self._runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, address, port, backlog=1024, ssl_context=tls).start()
        return int(runner.addresses[0][1])

    async def _answer_health(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer the kubelet, who has no certificate to show."""
        if not request.path.startswith("/v2/health/"):
            return _error(request, 404, f"nothing at {printable(request.path, 200)}; here is health alone")
        try:
            return self._server_route(request)
        except RefusalError as refusal:
            return _error(request, refusal.status_code, str(refusal))

    async def _answer_metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer whoever draws; however often, no more than one page a second is written, and no connection stays."""
        if request.path != "/metrics" or request.method != "GET":
            response = _error(request, 404, f"nothing at {printable(request.path, 200)}; GET /metrics is all there is")
        else:
            page = self._page.at(time.monotonic())
            response = web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})
        response.force_close()
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._route(request)
        except RefusalError as refusal:
            return _error(request, refusal.status_code, str(refusal))
        except ProtocolError as error:
            return _error(request, 400, str(error))
        except Exception as error:
            if isinstance(error, ConnectionError) and (request.transport is None or request.transport.is_closing()):
                return web.Response(status=_NOBODY_LEFT)
            log.exception("%s %s failed", request.method, printable(request.path, 200))
            return _error(request, 500, f"{type(error).__name__}: {error}")

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        match = _MODEL_PATH.match(request.path)
        if match is None:
            return self._server_route(request)
        name, action = match.groups()
        if action in _TAKE_REQUESTS:
            if request.method != "POST":
                raise RefusalError(405, f"{request.method} {request.path}: {action[1:]} takes POST")
            return await self._infer(request, name, action)
        model = self._host.model(name)
        if action is None:
            return _json(model.metadata())
        if action == "/pending":
            return _json(chat_routes.pending(model, name))
        if action.startswith(("/embeddings/", "/references/")):
            _, kind, named = action.split("/")
            answer = chat_routes.embeddings if kind == "embeddings" else chat_routes.references
            return await answer(request, model, name, named)
        return _json({"name": name, "ready": self._host.answers}, 200 if self._host.answers else 503)

    def _server_route(self, request: web.BaseRequest) -> web.StreamResponse:
        match request.path:
            case "/v2/health/live":
                return _json({"live": True})
            case "/v2/health/ready":
                ready = self._host.ready
                return _json({"live": ready, "ready": ready}, 200 if ready else 503)
            case "/metrics":
                return web.Response(body=exposition(self._host.models), headers={"Content-Type": CONTENT_TYPE_LATEST})
            case "/v2":
                return _json({"name": "trimtab", "version": "2", "extensions": ["binary_tensor_data"]})
        raise RefusalError(404, f"nothing at {request.path}; try /v2/models/NAME/infer")

    async def _infer(self, request: web.BaseRequest, name: str, action: str) -> web.StreamResponse:
        model = self._host.model(name)
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        header_length = request.headers.get(HEADER_LENGTH)
        body = await read_body(request, _header_bytes(header_length), self._max_body_bytes)
        asked = decode_request(name, body, header_length)
        try:
            if action == "/count":
                return _json(chat_routes.count(model, asked))
            if action == "/generate_stream":
                return await chat_routes.stream(request, model, asked, self._host.worker)
            answer = await model.infer(asked, self._host.worker)
        except RefusalError as refusal:
            return _error(request, refusal.status_code, str(refusal), asked.id)
        buffers, length = encode_response(answer, binary_outputs(asked, answer.outputs))
        return await _send(request, buffers, length)


def _header_bytes(written: str | None) -> int:
    try:
        return json_bytes(written, MAX_BODY_BYTES) if written else 0
    except ProtocolError:
        return 0  # it is refused once the body is here


async def _send(request: web.BaseRequest, buffers: Sequence[Buffer], header_length: int | None) -> web.StreamResponse:
    headers = {"Content-Type": BINARY_CONTENT_TYPE if header_length else JSON_CONTENT_TYPE}
    if header_length is not None:
        headers[HEADER_LENGTH] = str(header_length)
    total = sum(memoryview(buffer).nbytes for buffer in buffers)
    if total <= _JOIN_BELOW_BYTES:
        return web.Response(body=b"".join(buffers), headers=headers)
    response = web.StreamResponse(headers=headers)
    response.content_length = total
    await response.prepare(request)
    for buffer in buffers:
        await response.write(buffer)
    await response.write_eof()
    return response


def _json(content: object, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(content).encode(), status=status, content_type=JSON_CONTENT_TYPE)


def _error(request: web.BaseRequest, status: int, message: str, request_id: str = "") -> web.Response:
    """An error; the id says which request it answers, for callers who keep their connections."""
    body = error_body(printable(message), request_id)
    response = web.Response(body=body, status=status, content_type=JSON_CONTENT_TYPE)
    if not request.content.is_eof():
        response.force_close()  # the rest of the body is not worth reading
    return response
