"""Streaming client of OpenAI chat completions; measures time to first token and time between events."""

import base64
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from trimtab_loadtester.clients import Access, Client, ClientResponse, StreamTimings, error_message
from trimtab_loadtester.load_spec import LoadError
from trimtab_protocol import InferResponse, ProtocolError, Tensor
from trimtab_protocol.chat.internal_wire import bytes_tensor
from trimtab_protocol.sse import SseParser

PATH = "/v1/chat/completions"
BROKEN = "StreamBroken"
_DONE = b"[DONE]"


@dataclass(slots=True)
class StreamedReply:
    """Streamed chat completion so far; times in seconds since the request was sent."""

    text: str = ""
    text_events: int = 0
    first_seconds: float = float("nan")
    last_seconds: float = float("nan")
    is_complete: bool = False
    error: str = ""

    def add_event(self, data: bytes, at_seconds: float) -> None:
        """Add an event; raises ValueError, KeyError or TypeError if it is not a chat completion chunk."""
        chunk = json.loads(data)
        if "error" in chunk:
            self.error = str(chunk["error"]["message"])
            return
        for choice in chunk["choices"]:
            text = choice["delta"].get("content")
            if text:
                self.first_seconds = at_seconds if not self.text_events else self.first_seconds
                self.last_seconds, self.text_events, self.text = at_seconds, self.text_events + 1, self.text + text
            self.is_complete = self.is_complete or choice["finish_reason"] is not None

    @property
    def timings(self) -> StreamTimings:
        if self.text_events < 2:
            return StreamTimings(self.first_seconds, float("nan"))
        return StreamTimings(self.first_seconds, (self.last_seconds - self.first_seconds) / (self.text_events - 1))


@dataclass(slots=True)
class ChatClient(Client):
    """Streaming client over HTTP/1.1; one connection per chat in flight."""

    address: str
    """host:port of the router's REST port."""
    model: str
    """Name of the pipeline."""
    access: Access
    clock: Callable[[], float] = time.perf_counter
    _session: aiohttp.ClientSession | None = field(default=None, init=False)

    def encode(
        self, inputs: tuple[Tensor, ...], outputs: tuple[str, ...], parameters: Mapping[str, Any], request_id: str = ""
    ) -> bytes:
        """Encode the tensors `messages`, `images` and `options` as a chat completion request.

        Raises LoadError if there are other tensors, or parameters, which a chat completion request cannot hold.
        """
        del outputs, request_id
        tensors = {tensor.name: tensor.array.reshape(-1).tolist() for tensor in inputs}
        if "messages" not in tensors or not tensors.keys() <= {"messages", "images", "options"} or parameters:
            names = ", ".join([*tensors, *parameters])
            chat = "`messages`, `images` and `options`"
            raise LoadError(f"--protocol chat sends only {chat}; the pipeline's requests have {names}")
        images = iter(tensors.get("images", ()))
        try:
            messages = [_with_images(message, images) for message in json.loads(tensors["messages"][0])]
        except (ValueError, KeyError, TypeError) as error:
            start = tensors["messages"][0][:80]
            raise LoadError(f"`messages` {start!r} is not a JSON list of OpenAI messages: {error!r}") from error
        own = {"model": self.model, "messages": messages, "stream": True}
        return json.dumps(_fields(tensors["options"][0] if "options" in tensors else b"{}") | own).encode()

    async def send(self, encoded: bytes, request_id: str = "") -> ClientResponse:
        if self._session is None:
            raise RuntimeError("ChatClient is used outside an `async with` block")
        headers = {"Content-Type": "application/json"} | ({"x-request-id": request_id} if request_id else {})
        sent_at = self.clock()
        try:
            async with self._session.post(PATH, data=encoded, headers=headers) as response:
                response_headers = {name.lower(): value for name, value in response.headers.items()}
                if response.status != 200:
                    detail = error_message(await response.text(), "error", "message")
                    return ClientResponse(str(response.status), detail=detail, headers=response_headers)
                return _client_response(self.model, await self._read_stream(response, sent_at), response_headers)
        except aiohttp.ClientConnectorError as error:
            return ClientResponse("ConnectionRefused", detail=str(error))
        except (aiohttp.ClientError, OSError) as error:
            return ClientResponse("ConnectionLost", detail=str(error))
        except (ProtocolError, ValueError, KeyError, TypeError) as error:
            return ClientResponse("ProtocolError", detail=repr(error))

    async def _read_stream(self, response: aiohttp.ClientResponse, sent_at: float) -> StreamedReply:
        reply, parser = StreamedReply(), SseParser()
        async for content in response.content.iter_any():
            at_seconds = self.clock() - sent_at
            for _, data in parser.feed(content):
                if data != _DONE:
                    reply.add_event(data, at_seconds)
        return reply

    async def open(self) -> None:
        scheme = "http" if self.access.tls is None else "https"
        connector = aiohttp.TCPConnector(limit=0, ssl=self.access.tls or True)
        base = f"{scheme}://{self.address.removeprefix('http://').rstrip('/')}"
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(base, connector=connector, headers=self.access.headers, timeout=timeout)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _fields(options: bytes) -> dict[str, Any]:
    """Fields of a request that are the input `options`."""
    with suppress(ValueError):
        fields = json.loads(options)
        if isinstance(fields, dict):
            return fields
    raise LoadError(f"`options` {options[:80]!r} is not a JSON object of OpenAI's fields, such as max_tokens")


def _with_images(message: dict[str, Any], images: Iterator[bytes]) -> dict[str, Any]:
    """Replace the image placeholders of a message with the next images."""
    content = message["content"]
    if isinstance(content, str):
        return message
    parts = [_image_part(next(images)) if part["type"] == "image" else part for part in content]
    return message | {"content": parts}


def _image_part(image: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(image).decode()}"}}


def _client_response(model: str, reply: StreamedReply, headers: Mapping[str, str]) -> ClientResponse:
    if reply.error or not reply.is_complete:
        return ClientResponse(BROKEN, detail=reply.error or "the stream ended before its last event", headers=headers)
    text = Tensor("text", "BYTES", bytes_tensor([reply.text.encode()]))
    return ClientResponse("200", InferResponse(model, (text,)), headers=headers, stream_timings=reply.timings)
