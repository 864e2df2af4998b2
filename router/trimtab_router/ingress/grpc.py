"""gRPC front door: the methods of `inference.GRPCInferenceService`, as the door passes them on over HTTP/1.1.

The door (Envoy) speaks HTTP/2 with callers. Here a call is a POST whose body is framed messages, and its answer a
chunked body with the status in an HTTP trailer, or, for a refusal, an empty body with the status in the head; the door
makes both into what gRPC expects. Messages are parsed here, so that a malformed one is its caller's fault.
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
from trimtab_router.ingress.request_body import Decompression, read_body
from trimtab_router.ingress.request_parsing import ParsedHeader, client, client_disconnected, parse_call, request_id
from trimtab_router.ingress.slow_reader import require_timely_read
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
_MAX_QUESTION_BYTES = 2**16
_TIMEOUT = re.compile(r"^([0-9]{1,8})([HMSmun])$")
_TIMEOUT_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


@dataclass(frozen=True, slots=True)
class GrpcAnswer:
    """How a call ends: a gRPC status with its words, trailing metadata and, where there is one, the message."""

    status: int = 0
    details: str = ""
    trailing: Iterable[tuple[str, str]] = ()
    message: bytes | None = None


_Method = Callable[[bytes], GrpcAnswer]


def is_call(request: web.BaseRequest) -> bool:
    """Whether a request is a gRPC call; others with a similar content type (gRPC-Web) have frames of their own."""
    kind = request.headers.get("Content-Type", "")
    return request.method == "POST" and (
        kind == CONTENT_TYPE or kind.startswith((f"{CONTENT_TYPE}+", f"{CONTENT_TYPE};"))
    )


class GrpcIngress:
    """The gRPC methods of a router."""

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
            return GrpcResponse(await self._told(request))
        except Refusal as refusal:
            return GrpcResponse(_refused(refusal))
        except ConnectionError:
            raise
        except Exception:
            log.exception("a call of %s failed", printable(request.path, 200))
            return GrpcResponse(_refused(failure("InternalError", "the call failed", request_id(request))))

    async def _told(self, request: web.BaseRequest) -> GrpcAnswer:
        method = self._methods.get(request.path)
        if method is None:
            return GrpcAnswer(_UNIMPLEMENTED, f"no method {request.path}; this is {grpc_messages.SERVICE}")
        with self._router.budget.reservation() as reservation:
            return method(bytes(await self._message(request, reservation, _MAX_QUESTION_BYTES)))

    def _server_live(self, _: bytes) -> GrpcAnswer:
        return _encoded("ServerLive", live=True)

    def _server_ready(self, _: bytes) -> GrpcAnswer:
        return _encoded("ServerReady", ready=self._router.ready)

    def _server_metadata(self, _: bytes) -> GrpcAnswer:
        return _encoded("ServerMetadata", name=SERVER_NAME, version=SERVER_VERSION, extensions=EXTENSIONS)

    def _model_ready(self, message: bytes) -> GrpcAnswer:
        asked = _parse("ModelReady", message)
        check_model(self._router.pipeline.name, asked.name, asked.version)
        return _encoded("ModelReady", ready=self._router.ready)

    def _model_metadata(self, message: bytes) -> GrpcAnswer:
        asked = _parse("ModelMetadata", message)
        check_model(self._router.pipeline.name, asked.name, asked.version)
        metadata = model_metadata(self._router.pipeline)
        if "parameters" in metadata:
            metadata["parameters"] = _common(metadata["parameters"])
        return GrpcAnswer(message=grpc_messages.metadata_to_message(metadata).SerializeToString())

    async def _infer(self, request: web.BaseRequest) -> web.StreamResponse:
        router, arrived_at = self._router, time.monotonic()
        with await router.admit(arrived_at, client(request)) as reservation:
            call = await parse_call(router, request, reservation, arrived_at, partial(self._describe, request))
            response = await router.infer(call)
            reservation.answered()
            response = replace(response, parameters=_common(response.parameters))
            message = grpc_messages.response_to_message(response).SerializeToString()
            trailing = _identity(call.request_id)
            del call, response  # while the answer waits for its reader it is all there is
            reservation.deliver(len(message), partial(client_disconnected, request))
            answer = GrpcResponse(GrpcAnswer(trailing=trailing, message=message))
            await answer.prepare(request)
            return answer

    async def _describe(self, request: web.BaseRequest, reservation: Reservation) -> ParsedHeader:
        limits, deadline_seconds = self._router.limits, _deadline_seconds(request.headers)
        message = await self._message(request, reservation, limits.max_payload_bytes)
        return ParsedHeader(grpc_messages.read_request(message, limits.json_bytes), deadline_seconds)

    async def _message(self, request: web.BaseRequest, reservation: Reservation, most_bytes: int) -> Buffer:
        """The one message of a unary call, unpacked."""
        body = await read_body(request, reservation, most_bytes + MESSAGE_PREFIX_BYTES, self._router.body_seconds)
        message = body[MESSAGE_PREFIX_BYTES:]
        if len(body) < MESSAGE_PREFIX_BYTES or len(message) != int.from_bytes(body[1:MESSAGE_PREFIX_BYTES], "big"):
            raise invalid("a unary call carries exactly one message with its length before it")
        if not body[0]:
            return message
        encoding = request.headers.get("grpc-encoding", "")
        unpacking = Decompression(printable(encoding, 100), "the message", reservation, most_bytes)
        await unpacking.feed(message)
        return unpacking.finished()


class GrpcResponse(web.StreamResponse):
    """An answer on its way to the door, written by hand: HTTP/1.1 trailers are nothing aiohttp writes."""

    def __init__(self, answer: GrpcAnswer) -> None:
        super().__init__()
        self._answer = answer
        self._written = False

    @property
    def keep_alive(self) -> bool | None:
        """The door keeps its connections; only a body that was not read to its end costs one."""
        return True

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Write the whole answer, once."""
        if self._written:
            return request.writer
        self._written = True
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the door closed the connection")
        transport.writelines(written(self._answer))
        await require_timely_read(request, request.writer.drain())
        return request.writer

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to write."""


def written(answer: GrpcAnswer) -> list[bytes]:
    """The bytes of an answer in HTTP/1.1."""
    fields = [("grpc-status", str(answer.status)), *answer.trailing]
    if answer.details:
        fields.insert(1, ("grpc-message", _percent_encoded(printable(answer.details))))
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields).encode("ascii")
    if answer.message is None:
        return [_HEAD + b"content-length: 0\r\n" + lines + b"\r\n"]
    prefix = b"\x00" + len(answer.message).to_bytes(4, "big")
    size = b"%x\r\n" % (len(prefix) + len(answer.message))
    return [_HEAD + b"transfer-encoding: chunked\r\n\r\n" + size + prefix, answer.message, _END + lines + b"\r\n"]


def _deadline_seconds(metadata: Mapping[str, str]) -> float | None:
    """The `grpc-timeout` in seconds, None where there is none."""
    text = metadata.get("grpc-timeout")
    if text is None:
        return None
    match = _TIMEOUT.match(text)
    if match is None:
        raise invalid(f"grpc-timeout is {text[:40]!r}; it must be up to 8 digits and one of H, M, S, m, u, n")
    return int(match[1]) * _TIMEOUT_SECONDS[match[2]]


def _common(parameters: Parameters) -> Parameters:
    """Parameters of the kinds every client reads: some know no floating-point ones and lose them."""
    return {name: str(value) if isinstance(value, float) else value for name, value in parameters.items()}


def _parse(method: str, message: bytes) -> Any:
    try:
        return grpc_messages.request_class(method).FromString(message)
    except DecodeError as error:
        raise invalid(f"the message is no {method}Request of Open Inference Protocol V2: {error}") from error


def _identity(named: str) -> tuple[tuple[str, str], ...]:
    return (("x-request-id", named),) if named else ()


def _encoded(method: str, **fields: Any) -> GrpcAnswer:
    return GrpcAnswer(message=grpc_messages.response_class(method)(**fields).SerializeToString())


def _refused(refusal: Refusal) -> GrpcAnswer:
    trailing = [(REASON_HEADER, refusal.reason)]
    if refusal.stage:
        trailing.append((STAGE_HEADER, refusal.stage))
    if refusal.retry_after_seconds is not None:
        trailing.append(("grpc-retry-pushback-ms", str(int(refusal.retry_after_seconds * 1000))))
    return GrpcAnswer(_STATUS[refusal.code], refusal.message, tuple(trailing))


def _percent_encoded(text: str) -> str:
    """As gRPC writes messages: printable ASCII as it is, the rest and `%` as %XX."""
    if text.isascii() and text.isprintable() and "%" not in text:
        return text
    return "".join(chr(byte) if 0x20 <= byte <= 0x7E and byte != 0x25 else f"%{byte:02X}" for byte in text.encode())


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/grpc\r\n"
_END = b"\r\n0\r\n"
