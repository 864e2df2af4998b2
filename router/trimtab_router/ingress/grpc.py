"""gRPC front door: the methods of `inference.GRPCInferenceService`.

Messages are parsed here rather than by the server, so that a malformed one is the caller's fault with a message that
says so.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from trimtab_protocol import InferRequest, ProtocolError, grpc_messages
from trimtab_router.admission import check_model
from trimtab_router.ingress import EXTENSIONS, SERVER_NAME, SERVER_VERSION, model_metadata
from trimtab_router.refusal import Code, Refusal, invalid, malformed
from trimtab_router.router import Call, Router

log = logging.getLogger(__name__)

_STATUS = {
    Code.INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    Code.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    Code.PAYLOAD_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.RESOURCE_EXHAUSTED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.CANCELLED: grpc.StatusCode.CANCELLED,
    Code.INTERNAL: grpc.StatusCode.INTERNAL,
    Code.UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Code.DEADLINE_EXCEEDED: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_Handler = Callable[[bytes, Any], Awaitable[bytes]]


class GrpcIngress:
    """The handlers of the service, over a router."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def handler(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        """What a `grpc.aio` server registers."""
        methods: dict[str, _Handler] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._model_infer,
        }
        return grpc.method_handlers_generic_handler(
            grpc_messages.SERVICE,
            {name: grpc.unary_unary_rpc_method_handler(self._refusing(method)) for name, method in methods.items()},
        )

    def _refusing(self, method: _Handler) -> _Handler:
        async def handle(data: bytes, context: Any) -> bytes:
            try:
                return await method(data, context)
            except Refusal as refusal:
                await _abort(context, refusal)
            except Exception as error:
                log.exception("a request failed")
                if isinstance(error, grpc.aio.AbortError):
                    raise
                await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
            raise AssertionError("abort always raises")

        return handle

    async def _server_live(self, _: bytes, __: Any) -> bytes:
        return _encode("ServerLive", live=True)

    async def _server_ready(self, _: bytes, __: Any) -> bytes:
        return _encode("ServerReady", ready=self._router.ready)

    async def _server_metadata(self, _: bytes, __: Any) -> bytes:
        return _encode("ServerMetadata", name=SERVER_NAME, version=SERVER_VERSION, extensions=EXTENSIONS)

    async def _model_ready(self, data: bytes, _: Any) -> bytes:
        request = _parse("ModelReady", data)
        check_model(self._router.pipeline.name, request.name, request.version)
        return _encode("ModelReady", ready=self._router.ready)

    async def _model_metadata(self, data: bytes, _: Any) -> bytes:
        request = _parse("ModelMetadata", data)
        check_model(self._router.pipeline.name, request.name, request.version)
        return _encode("ModelMetadata", **model_metadata(self._router.pipeline))

    async def _model_infer(self, data: bytes, context: Any) -> bytes:
        router = self._router
        try:
            reservation = router.reserve(len(data))
        except Refusal as refusal:
            raise router.turn_away(refusal) from refusal
        with reservation:
            request = self._parse_infer(data)
            metadata = dict(context.invocation_metadata() or ())
            response = await router.infer(
                Call(
                    request,
                    deadline_seconds=context.time_remaining(),
                    request_id=str(metadata.get("x-request-id", "")),
                    trace_parent=str(metadata.get("traceparent", "")),
                )
            )
            if "x-request-id" in metadata:
                context.set_trailing_metadata((("x-request-id", metadata["x-request-id"]),))
            encoded: bytes = grpc_messages.response_to_message(response).SerializeToString()
            return encoded

    def _parse_infer(self, data: bytes) -> InferRequest:
        try:
            return grpc_messages.request_from_message(_parse("ModelInfer", data))
        except ProtocolError as error:
            raise self._router.turn_away(malformed(error)) from error
        except Refusal as refusal:
            raise self._router.turn_away(refusal) from refusal


def _parse(method: str, data: bytes) -> Any:
    try:
        return grpc_messages.request_class(method).FromString(data)
    except DecodeError as error:
        raise invalid(f"the message is no {method}Request of Open Inference Protocol V2: {error}") from error


def _encode(method: str, **fields: Any) -> bytes:
    encoded: bytes = grpc_messages.response_class(method)(**fields).SerializeToString()
    return encoded


async def _abort(context: Any, refusal: Refusal) -> None:
    trailing: tuple[tuple[str, str], ...] = (("x-trimtab-reason", refusal.reason),)
    if refusal.stage:
        trailing += (("x-trimtab-stage", refusal.stage),)
    if refusal.retry_after_seconds is not None:
        trailing += (("grpc-retry-pushback-ms", str(int(refusal.retry_after_seconds * 1000))),)
    await context.abort(_STATUS[refusal.code], refusal.message, trailing)
