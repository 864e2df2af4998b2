"""`GrpcIngress`: the methods of `inference.GRPCInferenceService`, as Envoy forwards them over HTTP/1.1.

Envoy speaks HTTP/2 with clients. Here a call is a POST whose body is framed messages. Its response is a chunked body
with the status in an HTTP trailer, or, for a refusal, an empty body with the status in the header. Envoy converts both
to gRPC. Messages are parsed here, so that a malformed one counts as a client error.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from google.protobuf.message import DecodeError

from trimtab_pipelines.error_codes import ErrorCode
from trimtab_protocol import Buffer, Parameters, grpc_messages
from trimtab_protocol.extensions import REASON_HEADER, STAGE_HEADER
from trimtab_protocol.sanitize import printable
from trimtab_router.admission.memory_budget import Reservation
from trimtab_router.admission.validation import check_model
from trimtab_router.ingress import EXTENSIONS, SERVER_NAME, SERVER_VERSION, model_metadata
from trimtab_router.ingress.base import require_timely_read
from trimtab_router.ingress.request_body import Decompression, read_body
from trimtab_router.ingress.request_parsing import (
    ParsedHeader,
    abort_connection,
    parse_call,
    request_client,
    request_id,
)
from trimtab_router.refusal import Refusal, failure, invalid
from trimtab_router.router import Router

log = logging.getLogger(__name__)

CONTENT_TYPE = "application/grpc"
MESSAGE_PREFIX_BYTES = 5
_STATUS = {  # https://grpc.github.io/grpc/core/md_doc_statuscodes.html
    ErrorCode.CANCELLED: 1,
    ErrorCode.INVALID_ARGUMENT: 3,
    ErrorCode.DEADLINE_EXCEEDED: 4,
    ErrorCode.REQUEST_TIMEOUT: 4,
    ErrorCode.NOT_FOUND: 5,
    ErrorCode.PERMISSION_DENIED: 7,
    ErrorCode.RESOURCE_EXHAUSTED: 8,
    ErrorCode.PAYLOAD_TOO_LARGE: 8,
    ErrorCode.METHOD_NOT_ALLOWED: 12,
    ErrorCode.UNIMPLEMENTED: 12,
    ErrorCode.INTERNAL: 13,
    ErrorCode.UNAVAILABLE: 14,
    ErrorCode.UNAUTHENTICATED: 16,
}
_UNIMPLEMENTED = 12
_INFER = grpc_messages.method_path("ModelInfer")
_MAX_UNARY_BYTES = 2**16
_TIMEOUT = re.compile(r"^([0-9]{1,8})([HMSmun])$")
_TIMEOUT_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


@dataclass(frozen=True, slots=True)
class GrpcReply:
    """End of a call: a gRPC status and its message, trailing metadata, and the response message if there is one."""

    status: int = 0
    details: str = ""
    trailing: Iterable[tuple[str, str]] = ()
    message: bytes | None = None


_Method = Callable[[bytes], GrpcReply]


def is_call(request: web.BaseRequest) -> bool:
    """Whether a request is a gRPC call. gRPC-Web has a similar content type but other frames."""
    kind = request.headers.get("Content-Type", "")
    return request.method == "POST" and (
        kind == CONTENT_TYPE or kind.startswith((f"{CONTENT_TYPE}+", f"{CONTENT_TYPE};"))
    )


class GrpcIngress:
    """gRPC methods of a router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        methods: dict[str, _Method] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
        }
        self._methods = {grpc_messages.method_path(name): method for name, method in methods.items()}

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Serve a call."""
        try:
            if request.path == _INFER:
                return await self._infer(request)
            return GrpcResponse(await self._call_method(request))
        except Refusal as refusal:
            return GrpcResponse(_refusal_reply(refusal))
        except ConnectionError:
            raise
        except Exception:
            log.exception("a call of %s failed", printable(request.path, 200))
            return GrpcResponse(_refusal_reply(failure("InternalError", "the call failed", request_id(request))))

    async def _call_method(self, request: web.BaseRequest) -> GrpcReply:
        method = self._methods.get(request.path)
        if method is None:
            return GrpcReply(_UNIMPLEMENTED, f"no method {request.path}; this is {grpc_messages.SERVICE}")
        with self._router.memory.reservation() as reservation:
            return method(bytes(await self._message(request, reservation, _MAX_UNARY_BYTES)))

    def _server_live(self, _: bytes) -> GrpcReply:
        return _reply("ServerLive", live=True)

    def _server_ready(self, _: bytes) -> GrpcReply:
        return _reply("ServerReady", ready=self._router.ready)

    def _server_metadata(self, _: bytes) -> GrpcReply:
        return _reply("ServerMetadata", name=SERVER_NAME, version=SERVER_VERSION, extensions=EXTENSIONS)

    def _model_ready(self, message: bytes) -> GrpcReply:
        request = _parse("ModelReady", message)
        check_model(self._router.pipeline.name, request.name, request.version)
        return _reply("ModelReady", ready=self._router.ready)

    def _model_metadata(self, message: bytes) -> GrpcReply:
        request = _parse("ModelMetadata", message)
        check_model(self._router.pipeline.name, request.name, request.version)
        metadata = model_metadata(self._router.pipeline)
        if "parameters" in metadata:
            metadata["parameters"] = _portable(metadata["parameters"])
        return GrpcReply(message=grpc_messages.metadata_to_message(metadata).SerializeToString())

    async def _infer(self, request: web.BaseRequest) -> web.StreamResponse:
        router, arrived_at = self._router, time.monotonic()
        with await router.admit(arrived_at, request_client(request)) as reservation:
            call = await parse_call(router, request, reservation, arrived_at, partial(self._read_header, request))
            response = await router.infer(call)
            reservation.mark_served()
            response = replace(response, parameters=_portable(response.parameters))
            message = grpc_messages.response_to_message(response).SerializeToString()
            trailing = _request_id_metadata(call.request_id)
            del call, response  # free the request while its response waits for the reader
            reservation.hold_response(len(message), partial(abort_connection, request))
            reply = GrpcResponse(GrpcReply(trailing=trailing, message=message))
            await reply.prepare(request)
            return reply

    async def _read_header(self, request: web.BaseRequest, reservation: Reservation) -> ParsedHeader:
        limits, deadline_seconds = self._router.limits, _deadline_seconds(request.headers)
        message = await self._message(request, reservation, limits.max_payload_bytes)
        return ParsedHeader(grpc_messages.read_request(message, limits.json_bytes), deadline_seconds)

    async def _message(self, request: web.BaseRequest, reservation: Reservation, max_bytes: int) -> Buffer:
        """The one message of a unary call, decompressed."""
        body = await read_body(request, reservation, max_bytes + MESSAGE_PREFIX_BYTES, self._router.body_seconds)
        message = body[MESSAGE_PREFIX_BYTES:]
        if len(body) < MESSAGE_PREFIX_BYTES or len(message) != int.from_bytes(body[1:MESSAGE_PREFIX_BYTES], "big"):
            raise invalid("a unary call has exactly one message, preceded by its length")
        if not body[0]:
            return message
        encoding = request.headers.get("grpc-encoding", "")
        decompression = Decompression(printable(encoding, 100), "the message", reservation, max_bytes)
        await decompression.feed(message)
        return decompression.finished()


class GrpcResponse(web.StreamResponse):
    """Response to Envoy, written directly to the transport, because aiohttp does not write HTTP/1.1 trailers."""

    def __init__(self, reply: GrpcReply) -> None:
        super().__init__()
        self._reply = reply
        self._sent = False

    @property
    def keep_alive(self) -> bool | None:
        """Envoy keeps its connections. Only an unread body closes one."""
        return True

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Write the whole response, once."""
        if self._sent:
            return request.writer
        self._sent = True
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the proxy closed the connection")
        transport.writelines(encode_reply(self._reply))
        await require_timely_read(request, request.writer.drain())
        return request.writer

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to write."""


def encode_reply(reply: GrpcReply) -> list[bytes]:
    """Bytes of a reply in HTTP/1.1."""
    fields = [("grpc-status", str(reply.status)), *reply.trailing]
    if reply.details:
        fields.insert(1, ("grpc-message", _percent_encoded(printable(reply.details))))
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields).encode("ascii")
    if reply.message is None:
        return [_HEAD + b"content-length: 0\r\n" + lines + b"\r\n"]
    prefix = b"\x00" + len(reply.message).to_bytes(4, "big")
    size = b"%x\r\n" % (len(prefix) + len(reply.message))
    return [_HEAD + b"transfer-encoding: chunked\r\n\r\n" + size + prefix, reply.message, _END + lines + b"\r\n"]


def _deadline_seconds(metadata: Mapping[str, str]) -> float | None:
    """`grpc-timeout` in seconds, None if absent."""
    text = metadata.get("grpc-timeout")
    if text is None:
        return None
    match = _TIMEOUT.match(text)
    if match is None:
        raise invalid(f"grpc-timeout is {text[:40]!r}; it must be up to 8 digits and one of H, M, S, m, u, n")
    return int(match[1]) * _TIMEOUT_SECONDS[match[2]]


def _portable(parameters: Parameters) -> Parameters:
    """Parameters of types that every client supports: some clients drop floating-point ones."""
    return {name: str(value) if isinstance(value, float) else value for name, value in parameters.items()}


def _parse(method: str, message: bytes) -> Any:
    try:
        return grpc_messages.request_class(method).FromString(message)
    except DecodeError as error:
        raise invalid(f"the message is not a {method}Request of the Open Inference Protocol V2: {error}") from error


def _request_id_metadata(call_id: str) -> tuple[tuple[str, str], ...]:
    return (("x-request-id", call_id),) if call_id else ()


def _reply(method: str, **fields: Any) -> GrpcReply:
    return GrpcReply(message=grpc_messages.response_class(method)(**fields).SerializeToString())


def _refusal_reply(refusal: Refusal) -> GrpcReply:
    trailing = [(REASON_HEADER, refusal.reason)]
    if refusal.stage:
        trailing.append((STAGE_HEADER, refusal.stage))
    if refusal.retry_after_seconds is not None:
        trailing.append(("grpc-retry-pushback-ms", str(int(refusal.retry_after_seconds * 1000))))
    return GrpcReply(_STATUS[refusal.code], refusal.message, tuple(trailing))


def _percent_encoded(text: str) -> str:
    """A gRPC message: printable ASCII unchanged, other bytes and `%` as %XX."""
    if text.isascii() and text.isprintable() and "%" not in text:
        return text
    return "".join(chr(byte) if 0x20 <= byte <= 0x7E and byte != 0x25 else f"%{byte:02X}" for byte in text.encode())


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/grpc\r\n"
_END = b"\r\n0\r\n"
