"""How a request reaches the pipeline: Open Inference Protocol V2 over REST with binary tensors, or over gRPC.

Requests are encoded before they are due. Connections stay open. What comes back is an `Answer` in every case: an error
on the way becomes a code of its own, so that each request can be accounted for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import aiohttp
import grpc

from trimtab_protocol import InferRequest, InferResponse, ProtocolError, RequestedOutput, Tensor, rest
from trimtab_protocol.grpc_messages import (
    method_path,
    request_to_message,
    response_class,
    response_from_message,
)

STAGE_HEADER, REASON_HEADER = "x-trimtab-stage", "x-trimtab-reason"
_CHANNELS = 4
_MAX_MESSAGE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What came back: an HTTP status or gRPC status name, or the name of the error that kept an answer away."""

    code: str
    response: InferResponse | None = None
    detail: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


class Wire(Protocol):
    """One way of sending requests."""

    def encode(self, inputs: tuple[Tensor, ...], outputs: tuple[str, ...], parameters: Mapping[str, Any]) -> Any:
        """Encode a request, so that sending it costs little."""
        ...

    async def send(self, encoded: Any, request_id: str) -> Answer:
        """Send one request and wait for what comes back."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class RestWire:
    """REST with binary tensors over HTTP/1.1 keep-alive; as many connections as there are requests under way."""

    def __init__(self, address: str, model: str) -> None:
        base = address if "://" in address else f"http://{address}"
        self._url = f"{base.rstrip('/')}/v2/models/{model}/infer"
        self._model = model
        self._session: aiohttp.ClientSession | None = None

    def encode(
        self, inputs: tuple[Tensor, ...], outputs: tuple[str, ...], parameters: Mapping[str, Any]
    ) -> tuple[bytes, str]:
        """Encode the body and its header length."""
        requested = tuple(RequestedOutput(name, {"binary_data": True}) for name in outputs)
        request = InferRequest(self._model, inputs, parameters=parameters, requested_outputs=requested)
        buffers, header_length = rest.encode_request(request)
        return b"".join(buffers), str(header_length)

    async def send(self, encoded: tuple[bytes, str], request_id: str) -> Answer:
        """Post one body."""
        body, header_length = encoded
        headers = {
            rest.HEADER_LENGTH: header_length,
            "Content-Type": rest.BINARY_CONTENT_TYPE,
            "x-request-id": request_id,
        }
        if self._session is None:
            raise RuntimeError("enter the wire before sending")
        try:
            async with self._session.post(self._url, data=body, headers=headers) as reply:
                content = await reply.read()
        except (aiohttp.ClientError, OSError) as error:
            return Answer(type(error).__name__, detail=str(error))
        if reply.status != 200:
            return Answer(str(reply.status), detail=content[:400].decode(errors="replace"), headers=_lower(reply))
        try:
            return Answer("200", rest.decode_response(content, reply.headers.get(rest.HEADER_LENGTH)))
        except ProtocolError as error:
            return Answer("ProtocolError", detail=str(error))

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=15.0),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()


class GrpcWire:
    """gRPC over a few connections, requests serialised ahead."""

    def __init__(self, address: str, model: str) -> None:
        self._address = address.removeprefix("grpc://")
        self._model = model
        self._channels: list[grpc.aio.Channel] = []
        self._calls: list[Any] = []
        self._turn = 0

    def encode(self, inputs: tuple[Tensor, ...], outputs: tuple[str, ...], parameters: Mapping[str, Any]) -> bytes:
        """Serialise the message."""
        requested = tuple(RequestedOutput(name) for name in outputs)
        request = InferRequest(self._model, inputs, parameters=parameters, requested_outputs=requested)
        return bytes(request_to_message(request).SerializeToString())

    async def send(self, encoded: bytes, request_id: str) -> Answer:
        """Call ModelInfer. No gRPC deadline is set: the router would take it as the request's."""
        turn = self._turn = (self._turn + 1) % len(self._calls)
        try:
            raw = await self._calls[turn](encoded, metadata=(("x-request-id", request_id),))
            return Answer("OK", response_from_message(response_class("ModelInfer").FromString(raw)))
        except grpc.aio.AioRpcError as error:
            return _grpc_error(error, self._channels[turn].get_state())
        except ProtocolError as error:
            return Answer("ProtocolError", detail=str(error))

    async def __aenter__(self) -> Self:
        options = [
            ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._channels = [grpc.aio.insecure_channel(self._address, options=options) for _ in range(_CHANNELS)]
        self._calls = [channel.unary_unary(method_path("ModelInfer"), None, None) for channel in self._channels]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            await channel.close(None)


def _lower(reply: aiohttp.ClientResponse) -> dict[str, str]:
    return {key.lower(): value for key, value in reply.headers.items()}


def _grpc_error(error: grpc.aio.AioRpcError, connection: grpc.ChannelConnectivity) -> Answer:
    """Read a status. A lost connection is UNAVAILABLE to gRPC too, but only the server's own word is a refusal."""
    pairs: Any = error.trailing_metadata() or ()
    metadata = {str(key): str(value) for key, value in pairs}
    name = str(error.code().name)
    if name == "UNAVAILABLE" and not metadata and connection is not grpc.ChannelConnectivity.READY:
        name = "ConnectionLost"
    return Answer(name, detail=error.details() or "", headers=metadata)
