"""Clients of a pipeline, and one of Open Inference Protocol V2 over REST with binary tensors.

Requests are encoded before they are due. Connections stay open. `Client.send` returns a `ClientResponse` in every case;
a connection error has its own code, so that each request has an outcome.
"""

import asyncio
import json
import ssl
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from trimtab_protocol import InferRequest, InferResponse, ProtocolError, RequestedOutput, Tensor, rest
from trimtab_protocol.http_client import ConnectionLost, ConnectionPool, request_head
from trimtab_protocol.sanitize import fits_header

MAX_ERROR_CHARACTERS = 4096


@dataclass(frozen=True, slots=True)
class StreamTimings:
    """Time to first token and mean time between events of a streamed response."""

    first_token_seconds: float
    """Seconds since the request was sent; NaN without text."""
    between_tokens_seconds: float
    """NaN for fewer than two events with text."""


@dataclass(frozen=True, slots=True, eq=False)
class ClientResponse:
    """Response to a request, or the error in its place."""

    code: str
    """An HTTP status, a gRPC status name, or the name of a client error."""
    message: InferResponse | None = None
    detail: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    stream_timings: StreamTimings | None = None


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials and TLS of a client, as file names, so that no secret is on a command line."""

    ca_file: Path | None = None
    """Certificate authority of the server; None disables TLS."""
    api_key_file: Path | None = None
    """File with only the client's API key."""

    @property
    def tls(self) -> ssl.SSLContext | None:
        """TLS context of a connection; None for plain text."""
        return None if self.ca_file is None else ssl.create_default_context(cafile=str(self.ca_file))

    @property
    def headers(self) -> dict[str, str]:
        """Authentication headers; raises ValueError if the file has no valid key."""
        if self.api_key_file is None:
            return {}
        key = self.api_key_file.read_text().strip()
        if not key or " " in key or not fits_header(key):
            raise ValueError(f"{self.api_key_file}: expected only a key, in printable ASCII without spaces")
        return {"x-api-key": key}


OPEN = Access()


class Client(ABC):
    """Client of one protocol; a context manager."""

    @abstractmethod
    def encode(
        self, inputs: tuple[Tensor, ...], outputs: tuple[str, ...], parameters: Mapping[str, Any], request_id: str = ""
    ) -> Any:
        """Encode a request ahead of time; the server returns `request_id` in its response."""

    def encoded_bytes(self, encoded: Any) -> int:
        return len(encoded)

    @abstractmethod
    async def send(self, encoded: Any, request_id: str = "") -> ClientResponse:
        """Send one request and wait for its response."""

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class RestClient(Client):
    """REST client with binary tensors over HTTP/1.1 keep-alive; one connection per request in flight.

    It uses the router's connection pool. A general HTTP client needs several times the CPU time, which the pipeline
    lacks if both run on one machine.
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
        """Encode the head, without its last empty line, and the body."""
        requested = tuple(RequestedOutput(name, {"binary_data": True}) for name in outputs)
        request = InferRequest(self._model, inputs, id=request_id, parameters=parameters, requested_outputs=requested)
        buffers, header_length = rest.encode_request(request)
        body = b"".join(buffers)
        headers = self._headers | {rest.HEADER_LENGTH: str(header_length), "Content-Type": rest.BINARY_CONTENT_TYPE}
        path = f"/v2/models/{self._model}/infer"
        head = request_head("POST", path, f"{self._host}:{self._port}", headers, len(body))
        return head.removesuffix(b"\r\n"), body

    def encoded_bytes(self, encoded: tuple[bytes, bytes]) -> int:
        return sum(map(len, encoded))

    async def send(self, encoded: tuple[bytes, bytes], request_id: str = "") -> ClientResponse:
        head, body = encoded
        try:
            connection = await self._connections.take()
        except ConnectionLost as error:
            return ClientResponse("ConnectionRefused", detail=str(error))
        try:
            head_end = f"x-request-id: {request_id}\r\n\r\n".encode() if request_id else b"\r\n"
            reply = await connection.exchange(head + head_end, (body,))
        except ConnectionLost as error:
            return ClientResponse("ConnectionLost", detail=str(error))
        self._connections.give_back(connection)
        if reply.status != 200:
            return ClientResponse(
                str(reply.status),
                detail=error_message(bytes(reply.body).decode(errors="replace"), "error"),
                headers=reply.headers,
            )
        try:
            response = rest.decode_response(reply.body, reply.headers.get(rest.HEADER_LENGTH.lower()))
            return ClientResponse("200", response, headers=reply.headers)
        except ProtocolError as error:
            return ClientResponse("ProtocolError", detail=str(error))

    async def open(self) -> None:
        """Do nothing: requests open connections."""

    async def close(self) -> None:
        await asyncio.gather(*self._connections.close())


def error_message(body: str, *path: str) -> str:
    """Error message at a path of a JSON body, or the start of any other body."""
    try:
        found = json.loads(body)
        for name in path:
            found = found[name]
        return str(found)
    except (ValueError, KeyError, TypeError):
        return body[:MAX_ERROR_CHARACTERS]
