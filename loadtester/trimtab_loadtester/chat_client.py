"""Chats at the door that OpenAI's clients use, streamed: when the first word of an answer came, and how fast others."""

import base64
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp
import numpy as np

from trimtab_loadtester.clients import Access, Answer, StreamTimings
from trimtab_loadtester.load_spec import LoadError
from trimtab_protocol import InferResponse, ProtocolError, Tensor
from trimtab_protocol.sse import SseParser

PATH = "/v1/chat/completions"
BROKEN = "StreamBroken"
_DONE = b"[DONE]"


@dataclass(slots=True)
class StreamedReply:
    """What a stream has told so far; moments in seconds since the chat was sent."""

    text: str = ""
    pieces: int = 0
    first_seconds: float = float("nan")
    last_seconds: float = float("nan")
    is_complete: bool = False
    error: str = ""

    def add_event(self, data: bytes, at_seconds: float) -> None:
        """Take note of an event; raises ValueError, KeyError or TypeError for one that is none of OpenAI's."""
        said = json.loads(data)
        if "error" in said:
            self.error = str(said["error"]["message"])
            return
        for choice in said["choices"]:
            words = choice["delta"].get("content")
            if words:
                self.first_seconds = at_seconds if not self.pieces else self.first_seconds
                self.last_seconds, self.pieces, self.text = at_seconds, self.pieces + 1, self.text + words
            self.is_complete = self.is_complete or choice["finish_reason"] is not None

    @property
    def timings(self) -> StreamTimings:
        """When words came."""
        between = (self.last_seconds - self.first_seconds) / (self.pieces - 1) if self.pieces > 1 else float("nan")
        return StreamTimings(self.first_seconds, between)


@dataclass(slots=True)
class ChatClient:
    """Streams over HTTP/1.1, as many connections as there are chats under way.

    Args:
        address: host:port of the door.
        model: the pipeline.
        access: what the door asks for.
        clock: in seconds.
    """

    address: str
    model: str
    access: Access
    clock: Callable[[], float] = time.perf_counter
    _session: aiohttp.ClientSession | None = field(default=None, init=False)

    def encode(
        self, inputs: tuple[Tensor, ...], outputs: tuple[str, ...], parameters: Mapping[str, Any], request_id: str = ""
    ) -> bytes:
        """The body of a chat whose `messages` and `images` are these tensors; LoadError where they are none.

        It has no place for parameters: a deadline is the pipeline's own.
        """
        del outputs, request_id
        tensors = {tensor.name: tensor.array for tensor in inputs}
        if "messages" not in tensors or not tensors.keys() <= {"messages", "images"} or parameters:
            named = ", ".join([*tensors, *parameters])
            raise LoadError(f"--wire chat sends `messages` and `images` alone; this pipeline's requests have {named}")
        images = iter(tensors["images"].reshape(-1).tolist() if "images" in tensors else ())
        try:
            messages = [_with_images(message, images) for message in json.loads(tensors["messages"].reshape(-1)[0])]
        except (ValueError, KeyError, TypeError) as error:
            said = tensors["messages"].reshape(-1)[0][:80]
            raise LoadError(f"`messages` {said!r} is no list of OpenAI's messages, in JSON: {error!r}") from error
        return json.dumps({"model": self.model, "messages": messages, "stream": True}).encode()

    def encoded_bytes(self, encoded: bytes) -> int:
        """Of the body."""
        return len(encoded)

    async def send(self, encoded: bytes, request_id: str = "") -> Answer:
        """Ask, and listen to the end."""
        if self._session is None:
            raise RuntimeError("a ChatWire is used in an `async with` block")
        headers = {"Content-Type": "application/json"} | ({"x-request-id": request_id} if request_id else {})
        began = self.clock()
        try:
            async with self._session.post(PATH, data=encoded, headers=headers) as response:
                told = {name.lower(): value for name, value in response.headers.items()}
                if response.status != 200:
                    return Answer(str(response.status), detail=_message(await response.text()), headers=told)
                return _answer(self.model, await self._listen(response, began), told)
        except aiohttp.ClientConnectorError as error:
            return Answer("ConnectionRefused", detail=str(error))
        except (aiohttp.ClientError, OSError) as error:
            return Answer("ConnectionLost", detail=str(error))
        except (ProtocolError, ValueError, KeyError, TypeError) as error:
            return Answer("ProtocolError", detail=repr(error))

    async def _listen(self, response: aiohttp.ClientResponse, began: float) -> StreamedReply:
        heard, reader = StreamedReply(), SseParser()
        async for piece in response.content.iter_any():
            at_seconds = self.clock() - began
            for _, data in reader.feed(piece):
                if data != _DONE:
                    heard.add_event(data, at_seconds)
        return heard

    async def __aenter__(self) -> Self:
        scheme = "http" if self.access.tls is None else "https"
        connector = aiohttp.TCPConnector(limit=0, ssl=self.access.tls or True)
        base = f"{scheme}://{self.address.removeprefix('http://').rstrip('/')}"
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(base, connector=connector, headers=self.access.headers, timeout=timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()


def _with_images(message: dict[str, Any], images: Iterator[bytes]) -> dict[str, Any]:
    """A message whose places for images hold the next ones."""
    content = message["content"]
    if isinstance(content, str):
        return message
    parts = [_shown(next(images)) if part["type"] == "image" else part for part in content]
    return message | {"content": parts}


def _shown(image: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(image).decode()}"}}


def _answer(model: str, heard: StreamedReply, headers: Mapping[str, str]) -> Answer:
    if heard.error or not heard.is_complete:
        return Answer(BROKEN, detail=heard.error or "the stream ended before the answer did", headers=headers)
    text = np.empty(1, dtype=object)
    text[0] = heard.text.encode()
    return Answer(
        "200", InferResponse(model, (Tensor("text", "BYTES", text),)), headers=headers, stream_timings=heard.timings
    )


def _message(body: str) -> str:
    """OpenAI's error message, or the start of whatever came instead."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:4096]
