"""Clients of a pipeline: Open Inference Protocol V2 over REST with binary tensors, or over gRPC.

Requests are encoded before they are due. Connections stay open. What comes back is an `Answer` in every case: an error
on the way becomes a code of its own, so that each request can be accounted for.
"""

import asyncio
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import grpc

from trimtab_protocol import InferRequest, InferResponse, ProtocolError, RequestedOutput, Tensor, rest
from trimtab_protocol.grpc_messages import (
    method_path,
    request_to_message,
    response_class,
    response_from_message,
)
from trimtab_protocol.http_client import ConnectionLost, ConnectionPool, request_head
from trimtab_protocol.sanitize import fits_header

CHANNELS = 4
_MAX_ERROR_BYTES = 4096
_MAX_MESSAGE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class StreamTimings:
    """When the words of a streamed answer came: seconds from when it was sent, and between two pieces on average.

    NaN without words, or with one piece alone.
    """

    first_token_seconds: float
    between_tokens_seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Response of a request: an HTTP status, a gRPC status name, or the name of a client error."""

    code: str
    response: InferResponse | None = None
    detail: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    stream_timings: StreamTimings | None = None


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials and TLS of a client, as file names, so that no secret is on a command line.

    Attributes:
        ca_file: TLS, with a server whose certificate this authority signed.
        api_key_file: holds the caller's key, and nothing else.
    """

    ca_file: Path | None = None
    api_key_file: Path | None = None

    @property
    def tls(self) -> ssl.SSLContext | None:
        """For a TLS connection; None for one in plain text."""
        return None if self.ca_file is None else ssl.create_default_context(cafile=str(self.ca_file))

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """The same for gRPC."""
        return None if self.ca_file is None else grpc.ssl_channel_credentials(self.ca_file.read_bytes())

    @property
    def headers(self) -> dict[str, str]:
        """What says who calls; raises ValueError, naming the file, where it holds no key."""
        if self.api_key_file is None:
            return {}
        key = self.api_key_file.read_text().strip()
        if not key or " " in key or not fits_header(key):
            raise ValueError(f"{self.api_key_file}: expected a key alone, in printable ASCII without spaces")
        return {"x-api-key": key}


OPEN = Access()


class Client(Protocol):
    """Client of one protocol."""

    def encode(
        self, inputs: tuple[Tensor, ...], outputs: tuple[str, ...], parameters: Mapping[str, Any], request_id: str = ""
    ) -> Any:
        """Encode a request, so that sending it costs little; an id that comes back in the answer may stand in it."""
        ...

    def encoded_bytes(self, encoded: Any) -> int:
        """The bytes that an encoded request takes until it is sent."""
        ...

    async def send(self, encoded: Any, request_id: str = "") -> Answer:
        """Send one request and wait for what comes back."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class RestClient:
    """REST with binary tensors over HTTP/1.1 keep-alive; as many connections as there are requests under way.

    The router's own connection carries it: a general HTTP client takes several times the processor time, which on one
    machine is taken from the pipeline.
    """

    def __init__(self, address: str, model: str, access: Access = OPEN) -> None:
        self._host, _, port = address.removeprefix("http://").rstrip("/").rpartition(":")
        if not self._host or not port.isdecimal():
            raise ValueError(f"address {address!r} must be HOST:PORT, such as 127.0.0.1:8080")
        self._port = int(port)
        self._model = model
        self._headers = access.headers
        self._connections = ConnectionPool(self._host, self._port, lambda: access.tls)

    def encode(
        self, inputs: tuple[Tensor, ...], outputs: tuple[str, ...], parameters: Mapping[str, Any], request_id: str = ""
    ) -> tuple[bytes, bytes]:
        """Encode the head, all but its end, and the body."""
        requested = tuple(RequestedOutput(name, {"binary_data": True}) for name in outputs)
        request = InferRequest(self._model, inputs, id=request_id, parameters=parameters, requested_outputs=requested)
        buffers, header_length = rest.encode_request(request)
        body = b"".join(buffers)
        headers = self._headers | {rest.HEADER_LENGTH: str(header_length), "Content-Type": rest.BINARY_CONTENT_TYPE}
        path = f"/v2/models/{self._model}/infer"
        head = request_head("POST", path, f"{self._host}:{self._port}", headers, len(body))
        return head.removesuffix(b"\r\n"), body

    def encoded_bytes(self, encoded: tuple[bytes, bytes]) -> int:
        """Of head and body."""
        return sum(map(len, encoded))

    async def send(self, encoded: tuple[bytes, bytes], request_id: str = "") -> Answer:
        """Post one body."""
        head, body = encoded
        try:
            connection = await self._connections.take()
        except ConnectionLost as error:
            return Answer("ConnectionRefused", detail=str(error))
        try:
            named = f"x-request-id: {request_id}\r\n\r\n".encode() if request_id else b"\r\n"
            reply = await connection.exchange(head + named, (body,))
        except ConnectionLost as error:
            return Answer("ConnectionLost", detail=str(error))
        self._connections.give_back(connection)
        if reply.status != 200:
            return Answer(str(reply.status), detail=_message(reply.body), headers=reply.headers)
        try:
            response = rest.decode_response(reply.body, reply.headers.get(rest.HEADER_LENGTH.lower()))
            return Answer("200", response, headers=reply.headers)
        except ProtocolError as error:
            return Answer("ProtocolError", detail=str(error))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*self._connections.close())


class GrpcClient:
    """gRPC over a few connections, requests serialised ahead."""

    def __init__(self, address: str, model: str, access: Access = OPEN, *, channels: int = CHANNELS) -> None:
        self._width = channels
        self._address = address.removeprefix("grpc://")
        self._credentials = access.credentials
        self._metadata = tuple(access.headers.items())
        self._model = model
        self._channels: list[grpc.aio.Channel] = []
        self._calls: list[Any] = []
        self._turn = 0

    def encode(
        self, inputs: tuple[Tensor, ...], outputs: tuple[str, ...], parameters: Mapping[str, Any], request_id: str = ""
    ) -> bytes:
        """Serialise the message."""
        requested = tuple(RequestedOutput(name) for name in outputs)
        request = InferRequest(self._model, inputs, id=request_id, parameters=parameters, requested_outputs=requested)
        return bytes(request_to_message(request).SerializeToString())

    def encoded_bytes(self, encoded: bytes) -> int:
        """Of the message."""
        return len(encoded)

    async def send(self, encoded: bytes, request_id: str = "") -> Answer:
        """Call ModelInfer. No gRPC deadline is set: the router would take it as the request's."""
        turn = self._turn = (self._turn + 1) % len(self._calls)
        named = (("x-request-id", request_id), *self._metadata) if request_id else self._metadata
        try:
            raw = await self._calls[turn](encoded, metadata=named)
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
        self._channels = [self._channel(options) for _ in range(self._width)]
        self._calls = [channel.unary_unary(method_path("ModelInfer"), None, None) for channel in self._channels]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            await channel.close(None)

    def _channel(self, options: list[tuple[str, int]]) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._address, options=options)
        return grpc.aio.secure_channel(self._address, self._credentials, options=options)


def _message(body: memoryview) -> str:
    """The protocol's error message, or the start of whatever came instead."""
    text = bytes(body[:_MAX_ERROR_BYTES]).decode(errors="replace")
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text


def _grpc_error(error: grpc.aio.AioRpcError, connection: grpc.ChannelConnectivity) -> Answer:
    """Read a status. A lost connection is UNAVAILABLE to gRPC too, but only the server's own word is a refusal."""
    pairs: Any = error.trailing_metadata() or ()
    metadata = {str(key): str(value) for key, value in pairs}
    name = str(error.code().name)
    if name == "UNAVAILABLE" and not metadata and connection is not grpc.ChannelConnectivity.READY:
        name = "ConnectionLost"
    return Answer(name, detail=error.details() or "", headers=metadata)
