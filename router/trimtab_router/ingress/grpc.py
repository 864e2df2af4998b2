"""gRPC front door: the methods of `inference.GRPCInferenceService`, as the door passes them on over HTTP/1.1.

The door (Envoy) speaks HTTP/2 with callers. Here a call is a POST whose body is framed messages, and its answer a
chunked body with the status in an HTTP trailer, or, for a refusal, an empty body with the status in the head; the door
makes both into what gRPC expects. Messages are parsed here, so that a malformed one is its caller's fault.
"""

import logging
import re
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from google.protobuf.message import DecodeError

from trimtab_protocol import Buffer, InferRequest, ProtocolError, grpc_messages
from trimtab_router.admission import check_model
from trimtab_router.ingress import EXTENSIONS, SERVER_NAME, SERVER_VERSION, model_metadata
from trimtab_router.refusal import Code, Refusal, invalid, malformed
from trimtab_router.router import Call, Router

log = logging.getLogger(__name__)

CONTENT_TYPE = "application/grpc"
MESSAGE_PREFIX_BYTES = 5
_STATUS = {  # https://grpc.github.io/grpc/core/md_doc_statuscodes.html
    Code.CANCELLED: 1,
    Code.INVALID_ARGUMENT: 3,
    Code.DEADLINE_EXCEEDED: 4,
    Code.NOT_FOUND: 5,
    Code.RESOURCE_EXHAUSTED: 8,
    Code.PAYLOAD_TOO_LARGE: 8,
    Code.INTERNAL: 13,
    Code.UNAVAILABLE: 14,
}
_UNIMPLEMENTED = 12
_TIMEOUT = re.compile(r"^([0-9]{1,8})([HMSmun])$")
_TIMEOUT_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_MAX_DETAILS = 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """How a call ends: a gRPC status with its words, trailing metadata and, where there is one, the message."""

    status: int = 0
    details: str = ""
    trailing: Iterable[tuple[str, str]] = ()
    message: bytes | None = None


@dataclass(frozen=True, slots=True)
class UnaryCall:
    """A call with the one message it carries."""

    metadata: Mapping[str, str]
    message: memoryview
    compressed: bool = False


_Method = Callable[[UnaryCall], Awaitable[Answer]]


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
            "ModelInfer": self._model_infer,
        }
        self._methods = {grpc_messages.method_path(name): method for name, method in methods.items()}

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Serve a call."""
        return GrpcResponse(await self._outcome(request))

    async def _outcome(self, request: web.BaseRequest) -> Answer:
        method = self._methods.get(request.path)
        if method is None:
            return Answer(_UNIMPLEMENTED, f"no method {request.path[:200]}; this is {grpc_messages.SERVICE}")
        try:
            return await method(_only_message(request.headers, await request.read()))
        except Refusal as refusal:
            return _refused(refusal)
        except Exception:
            log.exception("a request failed")
            return Answer(_STATUS[Code.INTERNAL], "the router failed; its log says why")

    async def _server_live(self, _: UnaryCall) -> Answer:
        return _encoded("ServerLive", live=True)

    async def _server_ready(self, _: UnaryCall) -> Answer:
        return _encoded("ServerReady", ready=self._router.ready)

    async def _server_metadata(self, _: UnaryCall) -> Answer:
        return _encoded("ServerMetadata", name=SERVER_NAME, version=SERVER_VERSION, extensions=EXTENSIONS)

    async def _model_ready(self, call: UnaryCall) -> Answer:
        request = self._parse("ModelReady", call)
        check_model(self._router.pipeline.name, request.name, request.version)
        return _encoded("ModelReady", ready=self._router.ready)

    async def _model_metadata(self, call: UnaryCall) -> Answer:
        request = self._parse("ModelMetadata", call)
        check_model(self._router.pipeline.name, request.name, request.version)
        return _encoded("ModelMetadata", **model_metadata(self._router.pipeline))

    async def _model_infer(self, call: UnaryCall) -> Answer:
        metadata, arrived_at = call.metadata, time.monotonic()
        await self._router.enter(arrived_at)
        request, deadline_seconds = self._parse_infer(call)
        request_id = metadata.get("x-request-id", "")
        response = await self._router.infer(
            Call(
                request,
                arrived_at,
                deadline_seconds=deadline_seconds,
                request_id=request_id,
                trace_parent=metadata.get("traceparent", ""),
            )
        )
        trailing = (("x-request-id", request_id),) if request_id else ()
        return Answer(trailing=trailing, message=grpc_messages.response_to_message(response).SerializeToString())

    def _parse_infer(self, call: UnaryCall) -> tuple[InferRequest, float | None]:
        try:
            message = self._parse("ModelInfer", call)
            return grpc_messages.request_from_message(message), _deadline_seconds(call.metadata)
        except ProtocolError as error:
            raise self._router.turn_away(malformed(error)) from error
        except Refusal as refusal:
            raise self._router.turn_away(refusal) from refusal

    def _parse(self, method: str, call: UnaryCall) -> Any:
        message: Buffer = call.message
        if call.compressed:
            encoding = call.metadata.get("grpc-encoding", "")
            message = _decompressed(message, encoding, self._router.limits.max_payload_bytes)
        try:
            return grpc_messages.request_class(method).FromString(bytes(message))
        except DecodeError as error:
            raise invalid(f"the message is no {method}Request of Open Inference Protocol V2: {error}") from error


class GrpcResponse(web.StreamResponse):
    """An answer on its way to the door, written by hand: HTTP/1.1 trailers are nothing aiohttp writes."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self._outcome = answer

    @property
    def keep_alive(self) -> bool | None:
        """The door keeps its connections; only a body that was not read to its end costs one."""
        return True

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Write the whole answer."""
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the door closed the connection")
        transport.writelines(written(self._outcome))
        await request.writer.drain()
        return request.writer

    async def write_eof(self, data: bytes = b"") -> None:
        """Nothing is left to write."""


def written(answer: Answer) -> list[bytes]:
    """The bytes of an answer in HTTP/1.1."""
    fields = [("grpc-status", str(answer.status)), *answer.trailing]
    if answer.details:
        fields.insert(1, ("grpc-message", _percent_encoded(answer.details[:_MAX_DETAILS])))
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields).encode("latin-1")
    if answer.message is None:
        return [_HEAD + b"content-length: 0\r\n" + lines + b"\r\n"]
    prefix = b"\x00" + len(answer.message).to_bytes(4, "big")
    size = b"%x\r\n" % (len(prefix) + len(answer.message))
    return [_HEAD + b"transfer-encoding: chunked\r\n\r\n" + size + prefix, answer.message, _END + lines + b"\r\n"]


def _only_message(metadata: Mapping[str, str], body: bytes) -> UnaryCall:
    if len(body) < MESSAGE_PREFIX_BYTES or len(body) - MESSAGE_PREFIX_BYTES != int.from_bytes(body[1:5], "big"):
        raise invalid("a unary call carries exactly one message with its length before it")
    return UnaryCall(metadata, memoryview(body)[MESSAGE_PREFIX_BYTES:], compressed=bool(body[0]))


def _deadline_seconds(metadata: Mapping[str, str]) -> float | None:
    """The `grpc-timeout` in seconds, None where there is none."""
    text = metadata.get("grpc-timeout")
    if text is None:
        return None
    match = _TIMEOUT.match(text)
    if match is None:
        raise invalid(f"grpc-timeout is {text[:40]!r}; it must be up to 8 digits and one of H, M, S, m, u, n")
    return int(match[1]) * _TIMEOUT_SECONDS[match[2]]


def _decompressed(message: Buffer, encoding: str, most_bytes: int) -> bytes:
    windows = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
    if encoding not in windows:
        raise invalid(f"grpc-encoding is {encoding[:40]!r}; use identity, gzip or deflate")
    decompressor = zlib.decompressobj(windows[encoding])
    try:
        data = decompressor.decompress(message, most_bytes + 1)
    except zlib.error as error:
        raise invalid(f"the message is not {encoding}: {error}") from error
    if len(data) > most_bytes:
        what = f"the message unpacks to more than {most_bytes} bytes"
        raise Refusal(Code.PAYLOAD_TOO_LARGE, "PayloadTooLarge", what)
    return data


def _encoded(method: str, **fields: Any) -> Answer:
    return Answer(message=grpc_messages.response_class(method)(**fields).SerializeToString())


def _refused(refusal: Refusal) -> Answer:
    trailing = [("x-trimtab-reason", refusal.reason)]
    if refusal.stage:
        trailing.append(("x-trimtab-stage", refusal.stage))
    if refusal.retry_after_seconds is not None:
        trailing.append(("grpc-retry-pushback-ms", str(int(refusal.retry_after_seconds * 1000))))
    return Answer(_STATUS[refusal.code], refusal.message, tuple(trailing))


def _percent_encoded(text: str) -> str:
    """As gRPC writes messages: printable ASCII as it is, the rest and `%` as %XX."""
    if text.isascii() and text.isprintable() and "%" not in text:
        return text
    return "".join(chr(byte) if 0x20 <= byte <= 0x7E and byte != 0x25 else f"%{byte:02X}" for byte in text.encode())


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/grpc\r\n"
_END = b"\r\n0\r\n"
