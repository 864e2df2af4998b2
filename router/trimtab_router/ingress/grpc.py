"""`GrpcIngress`: the methods of `inference.GRPCInferenceService`, as Envoy forwards them over HTTP/1.1.

Envoy speaks HTTP/2 with clients. Here a call is a POST whose body is framed messages. Its response is a chunked body
with the status in an HTTP trailer, or, for a refusal, an empty body with the status in the header. Envoy converts both
to gRPC. Messages are parsed here, so that a malformed one counts as a client error.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web
from google.protobuf.message import DecodeError

from trimtab_pipelines.request_outcome import ErrorCode
from trimtab_protocol import Buffer, InferResponse, Parameters, PendingRequest, grpc_messages
from trimtab_protocol.extensions import REASON_HEADER, STAGE_HEADER
from trimtab_protocol.sanitize import printable
from trimtab_router.admission.memory_budget import Reservation
from trimtab_router.admission.request_parsing import check_model
from trimtab_router.ingress import EXTENSIONS, SERVER_NAME, SERVER_VERSION, model_metadata
from trimtab_router.ingress.base import V2Ingress, WholeResponse
from trimtab_router.ingress.request_body import Decompression, read_body
from trimtab_router.refusal import Refusal, invalid
from trimtab_router.request import Call
from trimtab_router.router import Router

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
_INFER = grpc_messages.method_path("ModelInfer")
_MAX_UNARY_BYTES = 2**16
_TIMEOUT = re.compile(r"^([0-9]{1,8})([HMSmun])$")
_TIMEOUT_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


_Method = Callable[[bytes], list[bytes]]


def is_call(request: web.BaseRequest) -> bool:
    """Whether a request is a gRPC call. gRPC-Web has a similar content type but other frames."""
    kind = request.headers.get("Content-Type", "")
    return request.method == "POST" and (
        kind == CONTENT_TYPE or kind.startswith((f"{CONTENT_TYPE}+", f"{CONTENT_TYPE};"))
    )


class GrpcIngress(V2Ingress):
    """gRPC methods of a router."""

    def __init__(self, router: Router) -> None:
        super().__init__(router)
        methods: dict[str, _Method] = {
            "ServerLive": lambda _: _reply("ServerLive", live=True),
            "ServerReady": lambda _: _reply("ServerReady", ready=router.ready),
            "ServerMetadata": lambda _: _reply(
                "ServerMetadata", name=SERVER_NAME, version=SERVER_VERSION, extensions=EXTENSIONS
            ),
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
        }
        self._methods = {grpc_messages.method_path(name): method for name, method in methods.items()}

    async def route(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == _INFER:
            return await self.infer(request, partial(self._read, request))
        method = self._methods.get(request.path)
        if method is None:
            message = f"no method {request.path}; this is {grpc_messages.SERVICE}"
            return GrpcResponse(encode_reply(status=_STATUS[ErrorCode.UNIMPLEMENTED], details=message))
        with self._router.admission.memory.reservation() as reservation:
            return GrpcResponse(method(bytes(await self._message(request, reservation, _MAX_UNARY_BYTES))))

    def refuse(self, request: web.BaseRequest, refusal: Refusal) -> web.StreamResponse:  # noqa: ARG002 - REST reads it
        trailing = [(REASON_HEADER, refusal.reason)]
        if refusal.stage:
            trailing.append((STAGE_HEADER, refusal.stage))
        if refusal.retry_after_seconds is not None:
            trailing.append(("grpc-retry-pushback-ms", str(int(refusal.retry_after_seconds * 1000))))
        return GrpcResponse(encode_reply(trailing=trailing, status=_STATUS[refusal.code], details=refusal.message))

    def _model_ready(self, message: bytes) -> list[bytes]:
        request = _parse("ModelReady", message)
        check_model(self._router.pipeline.name, request.name, request.version)
        return _reply("ModelReady", ready=self._router.ready)

    def _model_metadata(self, message: bytes) -> list[bytes]:
        request = _parse("ModelMetadata", message)
        check_model(self._router.pipeline.name, request.name, request.version)
        metadata = model_metadata(self._router.pipeline)
        if "parameters" in metadata:
            metadata["parameters"] = _portable(metadata["parameters"])
        return encode_reply(grpc_messages.metadata_to_message(metadata).SerializeToString())

    async def _read(self, request: web.BaseRequest, reservation: Reservation) -> PendingRequest:
        limits = self._router.limits
        message = await self._message(request, reservation, limits.max_payload_bytes)
        return grpc_messages.read_request(message, limits.json_bytes)

    def deadline_seconds(self, request: web.BaseRequest) -> float | None:
        text = request.headers.get("grpc-timeout")
        if text is None:
            return None
        match = _TIMEOUT.match(text)
        if match is None:
            raise invalid(f"grpc-timeout is {text[:40]!r}; it must be up to 8 digits and one of H, M, S, m, u, n")
        return int(match[1]) * _TIMEOUT_SECONDS[match[2]]

    def encode(self, call: Call, response: InferResponse) -> tuple[list[bytes], dict[str, str]]:
        response = replace(response, parameters=_portable(response.parameters))
        message = grpc_messages.response_to_message(response).SerializeToString()
        trailing = (("x-request-id", call.request_id),) if call.request_id else ()
        return encode_reply(message, trailing), {}

    def whole(self, buffers: Sequence[Buffer], headers: dict[str, str]) -> web.StreamResponse:  # noqa: ARG002 - as above
        return GrpcResponse(buffers)

    async def send(
        self,
        request: web.BaseRequest,
        buffers: Sequence[Buffer],
        headers: dict[str, str],  # noqa: ARG002 - REST has some
    ) -> web.StreamResponse:
        reply = GrpcResponse(buffers)
        await reply.prepare(request)
        return reply

    async def _message(self, request: web.BaseRequest, reservation: Reservation, max_bytes: int) -> Buffer:
        body = await read_body(request, reservation, max_bytes + MESSAGE_PREFIX_BYTES, self._router.admission.uploads)
        message = body[MESSAGE_PREFIX_BYTES:]
        if len(body) < MESSAGE_PREFIX_BYTES or len(message) != int.from_bytes(body[1:MESSAGE_PREFIX_BYTES], "big"):
            raise invalid("a unary call has exactly one message, preceded by its length")
        if not body[0]:
            return message
        encoding = request.headers.get("grpc-encoding", "")
        decompression = Decompression(printable(encoding, 100), "the message", reservation, max_bytes)
        await decompression.feed(message)
        return decompression.finished()


class GrpcResponse(WholeResponse):
    """Response to Envoy with its header and trailer, which aiohttp does not write."""

    @property
    def keep_alive(self) -> bool | None:
        """Envoy keeps its connections. Only an unread body closes one."""
        return True


def encode_reply(
    message: bytes | None = None, trailing: Iterable[tuple[str, str]] = (), *, status: int = 0, details: str = ""
) -> list[bytes]:
    """Reply in HTTP/1.1. `message` is that of the response, None for a refusal, and `details` that of the status."""
    fields = [("grpc-status", str(status)), *trailing]
    if details:
        fields.insert(1, ("grpc-message", _percent_encoded(printable(details))))
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields).encode("ascii")
    if message is None:
        return [_HEAD + b"content-length: 0\r\n" + lines + b"\r\n"]
    prefix = b"\x00" + len(message).to_bytes(4, "big")
    size = b"%x\r\n" % (len(prefix) + len(message))
    return [_HEAD + b"transfer-encoding: chunked\r\n\r\n" + size + prefix, message, _END + lines + b"\r\n"]


def _portable(parameters: Parameters) -> Parameters:
    """Parameters of types that every client supports: some clients drop floating-point ones."""
    return {name: str(value) if isinstance(value, float) else value for name, value in parameters.items()}


def _parse(method: str, message: bytes) -> Any:
    try:
        return grpc_messages.request_class(method).FromString(message)
    except DecodeError as error:
        raise invalid(f"the message is not a {method}Request of the Open Inference Protocol V2: {error}") from error


def _reply(method: str, **fields: Any) -> list[bytes]:
    return encode_reply(grpc_messages.response_class(method)(**fields).SerializeToString())


def _percent_encoded(text: str) -> str:
    """A gRPC message: printable ASCII unchanged, other bytes and `%` as %XX."""
    if text.isascii() and text.isprintable() and "%" not in text:
        return text
    return "".join(chr(byte) if 0x20 <= byte <= 0x7E and byte != 0x25 else f"%{byte:02X}" for byte in text.encode())


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/grpc\r\n"
_END = b"\r\n0\r\n"
