"""gRPC front door: the methods of `inference.GRPCInferenceService`.

Messages are parsed here, so that a malformed one is the caller's fault with a message that says so.
"""

import asyncio
import logging
import re
import time
import zlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from google.protobuf.message import DecodeError

from trimtab_protocol import Buffer, InferRequest, ProtocolError, grpc_messages
from trimtab_router.admission import check_model
from trimtab_router.ingress import EXTENSIONS, SERVER_NAME, SERVER_VERSION, model_metadata
from trimtab_router.ingress.http2 import Http2Connection, UnaryAnswer, UnaryCall
from trimtab_router.refusal import Code, Refusal, invalid, malformed
from trimtab_router.router import Call, Router

log = logging.getLogger(__name__)

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
_Method = Callable[[UnaryCall], Awaitable[UnaryAnswer]]


class GrpcIngress:
    """The gRPC server of a router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._server: asyncio.Server | None = None
        self._connections: set[Http2Connection] = set()
        methods: dict[str, _Method] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._model_infer,
        }
        self._methods = {grpc_messages.method_path(name): method for name, method in methods.items()}

    async def open(self, host: str, port: int, backlog: int) -> int:
        """Listen; returns the port. Raises OSError where it is taken."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Http2Connection(self._answer, self._reserve, self._connections), host, port, backlog=backlog
        )
        return int(self._server.sockets[0].getsockname()[1])

    def leave(self) -> None:
        """End the connections there are once their calls are answered; a caller that connects anew is still served."""
        for connection in list(self._connections):
            connection.drain()

    @property
    def connected(self) -> bool:
        """Whether anybody is."""
        return bool(self._connections)

    def stop_listening(self) -> None:
        """Take no more connections, and end those there are once their calls are answered."""
        if self._server is not None:
            self._server.close()
        self.leave()

    def close(self) -> None:
        """Cut the connections that are left."""
        for connection in list(self._connections):
            connection.close()

    def _reserve(self, size_bytes: int) -> AbstractContextManager[None] | UnaryAnswer:
        most = self._router.limits.max_payload_bytes
        if size_bytes > most:
            message = f"the message has {size_bytes} bytes; at most {most} bytes are taken"
            return _refused(self._router.turn_away(Refusal(Code.PAYLOAD_TOO_LARGE, "PayloadTooLarge", message)))
        try:
            return self._router.reserve(size_bytes)
        except Refusal as refusal:
            return _refused(self._router.turn_away(refusal))

    async def _answer(self, call: UnaryCall) -> UnaryAnswer:
        method = self._methods.get(call.path)
        if method is None:
            return UnaryAnswer(_UNIMPLEMENTED, f"no method {call.path}; this is {grpc_messages.SERVICE}")
        try:
            return await method(call)
        except Refusal as refusal:
            return _refused(refusal)
        except Exception as error:
            log.exception("a request failed")
            return UnaryAnswer(_STATUS[Code.INTERNAL], f"{type(error).__name__}: {error}")

    async def _server_live(self, _: UnaryCall) -> UnaryAnswer:
        return _encoded("ServerLive", live=True)

    async def _server_ready(self, _: UnaryCall) -> UnaryAnswer:
        return _encoded("ServerReady", ready=self._router.ready)

    async def _server_metadata(self, _: UnaryCall) -> UnaryAnswer:
        return _encoded("ServerMetadata", name=SERVER_NAME, version=SERVER_VERSION, extensions=EXTENSIONS)

    async def _model_ready(self, call: UnaryCall) -> UnaryAnswer:
        request = self._parse("ModelReady", call)
        check_model(self._router.pipeline.name, request.name, request.version)
        return _encoded("ModelReady", ready=self._router.ready)

    async def _model_metadata(self, call: UnaryCall) -> UnaryAnswer:
        request = self._parse("ModelMetadata", call)
        check_model(self._router.pipeline.name, request.name, request.version)
        return _encoded("ModelMetadata", **model_metadata(self._router.pipeline))

    async def _model_infer(self, call: UnaryCall) -> UnaryAnswer:
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
        return UnaryAnswer(0, "", trailing, grpc_messages.response_to_message(response).SerializeToString())

    def _parse_infer(self, call: UnaryCall) -> tuple[InferRequest, float | None]:
        try:
            message = self._parse("ModelInfer", call)
            return grpc_messages.request_from_message(message), _deadline_seconds(call.metadata)
        except ProtocolError as error:
            raise self._router.turn_away(malformed(error)) from error
        except Refusal as refusal:
            raise self._router.turn_away(refusal) from refusal

    def _parse(self, method: str, call: UnaryCall) -> Any:
        message = call.message
        if call.compressed:
            encoding = call.metadata.get("grpc-encoding", "")
            message = _decompressed(message, encoding, self._router.limits.max_payload_bytes)
        try:
            return grpc_messages.request_class(method).FromString(bytes(message))
        except DecodeError as error:
            raise invalid(f"the message is no {method}Request of Open Inference Protocol V2: {error}") from error


def _deadline_seconds(metadata: Mapping[str, str]) -> float | None:
    """The `grpc-timeout` in seconds, None where there is none."""
    written = metadata.get("grpc-timeout")
    if written is None:
        return None
    match = _TIMEOUT.match(written)
    if match is None:
        raise invalid(f"grpc-timeout is {written!r}; it must be up to 8 digits and one of H, M, S, m, u, n")
    return int(match[1]) * _TIMEOUT_SECONDS[match[2]]


def _decompressed(message: Buffer, encoding: str, most_bytes: int) -> bytes:
    windows = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
    if encoding not in windows:
        raise invalid(f"grpc-encoding is {encoding!r}; use identity, gzip or deflate")
    decompressor = zlib.decompressobj(windows[encoding])
    try:
        data = decompressor.decompress(message, most_bytes + 1)
    except zlib.error as error:
        raise invalid(f"the message is not {encoding}: {error}") from error
    if len(data) > most_bytes:
        what = f"the message unpacks to more than {most_bytes} bytes"
        raise Refusal(Code.PAYLOAD_TOO_LARGE, "PayloadTooLarge", what)
    return data


def _encoded(method: str, **fields: Any) -> UnaryAnswer:
    return UnaryAnswer(0, message=grpc_messages.response_class(method)(**fields).SerializeToString())


def _refused(refusal: Refusal) -> UnaryAnswer:
    trailing = [("x-trimtab-reason", refusal.reason)]
    if refusal.stage:
        trailing.append(("x-trimtab-stage", refusal.stage))
    if refusal.retry_after_seconds is not None:
        trailing.append(("grpc-retry-pushback-ms", str(int(refusal.retry_after_seconds * 1000))))
    return UnaryAnswer(_STATUS[refusal.code], refusal.message, tuple(trailing))
