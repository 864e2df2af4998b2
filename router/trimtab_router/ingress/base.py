"""`Ingress` and `V2Ingress`: bases of the request handlers, and what their transports have in common."""

import asyncio
import hashlib
import json
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import SERVER_SOFTWARE, HttpVersion11

from trimtab_protocol import Buffer, InferResponse, PendingRequest, ProtocolError
from trimtab_protocol.extensions import CLIENT_HEADER, REASON_HEADER, STAGE_HEADER
from trimtab_protocol.host_check import FORBIDDEN
from trimtab_protocol.sanitize import MAX_HEADER_CHARACTERS, header_value, printable
from trimtab_router.admission.memory_budget import Reservation
from trimtab_router.refusal import Refusal, failure, invalid
from trimtab_router.request import Call
from trimtab_router.router import Router

log = logging.getLogger(__name__)

MAX_CACHED_CLIENTS = 256
WHOLE_BYTES = 64 * 2**10  # responses up to this size are written at once: a copy costs less than another write
READ_SECONDS = 10.0  # time limit for a client to read one write, of at most a megabyte, of its response
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")


class Ingress(ABC):
    """HTTP handler over a router: calls, error responses, and connections of a terminating router."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            response = await self.route(request)
        except Refusal as refusal:
            response = self.refuse(request, refusal)
        except ConnectionError:
            raise
        except Exception:
            log.exception("%s %s failed", printable(request.method, 100), printable(request.path, 200))
            response = self.refuse(request, failure("InternalError", "the request failed", request_id(request)))
        if self._router.terminating:
            response.force_close()  # the client's next request finds another router
        return response

    @abstractmethod
    async def route(self, request: web.BaseRequest) -> web.StreamResponse:
        """Serve a request; a Refusal becomes an error response."""

    @abstractmethod
    def refuse(self, request: web.BaseRequest, refusal: Refusal) -> web.StreamResponse: ...

    async def admit(self, request: web.BaseRequest, arrived_at: float) -> Reservation:
        """Admit a request until its reservation ends. Raises Refusal, already counted."""
        with self.reading(request):
            return await self._router.admission.admit(arrived_at, request_client(request))

    @contextmanager
    def reading(self, request: web.BaseRequest) -> Iterator[None]:
        """Context in which a request is read. Whatever fails there is raised as a Refusal, and counted."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - becomes a counted refusal
            refusal = self.count_unreadable(request, error)
            raise refusal from refusal.__cause__

    def count_unreadable(self, request: web.BaseRequest, error: Exception) -> Refusal:
        """Count a request that cannot be read. Returns the refusal, to be raised."""
        if isinstance(error, Refusal):
            refusal = error
        elif isinstance(error, ProtocolError):
            refusal = invalid(str(error))
        else:
            log.error("a request cannot be read", exc_info=error)
            refusal = failure("InternalError", "the request cannot be read", request_id(request))
        if refusal is not error:
            refusal.__cause__ = error
        return self._router.accounting.count_rejection(refusal)

    def describe(
        self, call: Call, request: web.BaseRequest, reservation: Reservation, arrived_at: float, call_id: str
    ) -> None:
        trace_parent = request.headers.get("traceparent")
        if trace_parent and _TRACE_PARENT.match(trace_parent):
            call.trace_parent = trace_parent
        call.client = reservation.client
        call.arrived_at = arrived_at
        call.request_id = call_id
        call.hold_bytes = reservation.record


class V2Ingress(Ingress):
    """Handler of the V2 protocol: REST or gRPC."""

    async def infer(
        self, request: web.BaseRequest, read: Callable[[Reservation], Awaitable[PendingRequest]]
    ) -> web.StreamResponse:
        """Serve an inference request. `read` reads its body up to the description of its tensors."""
        router, arrived_at, reservation = self._router, time.monotonic(), None
        try:
            try:
                reservation = await router.admission.admit(arrived_at, request_client(request))
                deadline_seconds = self.deadline_seconds(request)
                call = await router.admission.parse(await read(reservation), reservation)
            except Exception as error:  # noqa: BLE001 - becomes a counted refusal
                refusal = self.count_unreadable(request, error)
                raise refusal from refusal.__cause__
            self.describe(call, request, reservation, arrived_at, request_id(request))
            call.deadline_seconds = deadline_seconds
            response = await router.infer(call)
            reservation.mark_served()
            buffers, headers = self.encode(call, response)
            del call, response  # free the request while its response waits for the reader
            size = sum(map(len, buffers))
            if size <= WHOLE_BYTES:
                return self.whole(buffers, headers)
            reservation.hold_response(size, partial(abort_connection, request))
            return await self.send(request, buffers, headers)
        finally:
            if reservation is not None:
                reservation.end()

    def deadline_seconds(self, request: web.BaseRequest) -> float | None:  # noqa: ARG002 - gRPC reads it
        """Time left according to the transport, None if it gives no deadline."""
        return None

    @abstractmethod
    def encode(self, call: Call, response: InferResponse) -> tuple[Sequence[Buffer], dict[str, str]]: ...

    @abstractmethod
    def whole(self, buffers: Sequence[Buffer], headers: dict[str, str]) -> web.StreamResponse:
        """Response that is written at once."""

    @abstractmethod
    async def send(
        self, request: web.BaseRequest, buffers: Sequence[Buffer], headers: dict[str, str]
    ) -> web.StreamResponse: ...


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    body = json.dumps(content).encode()
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def foreign_host_response() -> web.Response:
    return json_response({"error": FORBIDDEN}, 403, {REASON_HEADER: "Forbidden"})


def health_response(router: Router, *, live: bool) -> web.Response:
    """Health of the router. Status 503 while it is not ready, unless only liveness is asked for."""
    return json_response({"live": True, "ready": router.ready}, 200 if live or router.ready else 503)


def error_response(request: web.BaseRequest, refusal: Refusal, body: object) -> web.Response:
    """JSON response of a refusal. It closes the connection if the request's body has not been read."""
    headers = {REASON_HEADER: refusal.reason}
    if refusal.stage:
        headers[STAGE_HEADER] = refusal.stage
    if refusal.retry_after_seconds is not None:
        headers["Retry-After"] = str(max(1, round(refusal.retry_after_seconds)))
    response = json_response(body, refusal.code.value, headers)
    if not request.content.is_eof():
        response.force_close()
    return response


async def require_timely_read(request: web.BaseRequest, write: Awaitable[None]) -> None:
    """Await a write. Raises ConnectionResetError, and closes the connection, if the client does not read it in time."""
    try:
        async with asyncio.timeout(READ_SECONDS):
            await write
    except TimeoutError:
        abort_connection(request)
        raise ConnectionResetError("the client does not read its response") from None


def abort_connection(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()


def request_id(request: web.BaseRequest) -> str:
    """Request id that is safe for a header, empty if the client sent none."""
    text = request.headers.get("x-request-id")
    return header_value(text) if text else ""


class WholeResponse(web.StreamResponse):
    """Response written at once, without the steps that aiohttp takes for a response in parts."""

    def __init__(self, chunks: Sequence[Buffer], fields: str | None = None) -> None:
        """`fields` are the lines of the header; None: the chunks begin with a complete header."""
        self._chunks = chunks
        self._fields = fields
        self._sent = False

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        if self._sent:
            return request.writer
        self._sent = True
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client closed the connection")
        if self._fields is not None:
            self._chunks = (self._head(request), *self._chunks)
        transport.writelines(self._chunks)
        if request.protocol.writing_paused:
            await require_timely_read(request, request.writer.drain())
        return request.writer

    def _head(self, request: web.BaseRequest) -> bytes:
        if self._keep_alive is None:
            self._keep_alive = request.keep_alive
        if self._keep_alive == (request.version >= HttpVersion11):
            connection = ""
        else:
            connection = f"Connection: {'keep-alive' if self._keep_alive else 'close'}\r\n"
        size = sum(map(len, self._chunks))
        date = rfc822_formatted_time()
        return (
            f"HTTP/1.1 200 OK\r\n{self._fields}Content-Length: {size}\r\n"
            f"Date: {date}\r\nServer: {SERVER_SOFTWARE}\r\n{connection}\r\n"
        ).encode("ascii")

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to write."""


def request_client(request: web.BaseRequest) -> str:
    """The client as named by Envoy; without Envoy, its address."""
    return client_name(request.headers.get(CLIENT_HEADER) or request.remote or "")


@lru_cache(MAX_CACHED_CLIENTS)
def client_name(name: str) -> str:
    """Client name that is safe for a header. A long one is cut and ends with its digest, so that it stays unique."""
    if len(name) <= MAX_HEADER_CHARACTERS:
        return header_value(name)
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
    return header_value(f"{name[: MAX_HEADER_CHARACTERS - len(digest) - 1]}#{digest}")
