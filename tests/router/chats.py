"""Fake model server that streams chats (decision 41), and chats for it."""

import asyncio
import base64
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from aiohttp import web

from tests.builders import a_variant
from tests.router.fakes import FakeReplica, a_pipeline
from trimtab_pipelines.spec import InferencePipeline
from trimtab_protocol import rest
from trimtab_protocol.chat.internal_wire import TENANTS

ANSWER = (
    {"name": "text", "datatype": "BYTES"},
    {"name": "finish_reason", "datatype": "BYTES"},
    {"name": "usage", "datatype": "INT64", "shape": [5]},
)
INPUTS = (
    {"name": "messages", "datatype": "BYTES"},
    {"name": "options", "datatype": "BYTES", "optional": True},
    {"name": "images", "datatype": "BYTES", "shape": [-1], "optional": True},
)


def a_writer(*extra: dict[str, Any], **changes: Any) -> dict[str, Any]:
    own = [
        {"name": i["name"], "from": f"request.inputs.{i['name']}", "optional": i.get("optional", False)} for i in INPUTS
    ]
    return {
        "name": "text",
        "inputs": list(extra) or own,
        "outputs": list(ANSWER),
        "variants": [a_variant()],
        "role": "Generate",
    } | changes


def a_chat_pipeline(stages: Sequence[dict[str, Any]] = (), **changes: Any) -> InferencePipeline:
    outputs = [{"name": output["name"], "from": f"text.outputs.{output['name']}"} for output in ANSWER]
    spec = {"inputs": list(INPUTS), "outputs": outputs} | changes
    return a_pipeline(list(stages) or [a_writer()], **spec)


@dataclass
class Written:
    """One row that a fake writes or wrote."""

    messages: list[dict[str, Any]]
    options: dict[str, Any]
    images: list[bytes]
    inputs: dict[str, np.ndarray]
    tenants: list[str] = field(default_factory=list)
    ended: str = ""


@dataclass
class ChatReplica(FakeReplica):
    """Writes the words of the last message, each as a piece, `pace_seconds` apart; `step` lets a word out at a time.

    `break_after` so many words: "die" cuts the connection, "error" says that it failed, "end" says nothing. One that
    `dies_reading` cuts it each time that it has read what is asked.
    """

    pace_seconds: float = 0.0
    stepped: bool = False
    break_after: int | None = None
    breaks: str = "die"
    written: list[Written] = field(default_factory=list)
    refusing: tuple[int, str] | None = None
    counts: dict[str, Any] | None = None
    counted: list[Any] = field(default_factory=list)
    alive: bool = False
    handler_cancellation = True
    preamble: ClassVar[bytes] = b""
    dies_reading: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps = asyncio.Semaphore(0)
        self.count_gate = asyncio.Event()
        self.count_gate.set()
        self.counting = self.most_counting = 0

    async def answer_request(self, request: web.BaseRequest) -> web.StreamResponse:
        action = request.path.rpartition("/")[2]
        if action not in {"generate_stream", "count"}:
            return await super().answer_request(request)
        asked = rest.decode_request("m", await request.read(), request.headers.get(rest.HEADER_LENGTH))
        inputs = {tensor.name: tensor.array for tensor in asked.inputs}
        chat = Written(
            json.loads(inputs["messages"][0]),
            json.loads(inputs["options"][0]) if "options" in inputs else {},
            list(inputs["images"][0]) if "images" in inputs else [],
            inputs,
            json.loads(str(asked.parameters.get(TENANTS, "[]"))),
        )
        if self.refusing is not None:
            return web.json_response({"error": self.refusing[1]}, status=self.refusing[0])
        if action == "count":
            self.counted += [json.loads(body) for body in inputs.get("references", ())]
            self.counting += 1
            self.most_counting = max(self.most_counting, self.counting)
            try:
                await self.count_gate.wait()
            finally:
                self.counting -= 1
            return web.json_response(self.counts)
        self.written.append(chat)
        if self.dies_reading:
            return await self.break_stream(request, web.StreamResponse(), chat)
        return await self._counted(request, chat)

    async def _counted(self, request: web.BaseRequest, chat: Written) -> web.StreamResponse:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self.write_stream(request, chat)
        except (asyncio.CancelledError, ConnectionError):
            chat.ended = chat.ended or "left"
            raise
        finally:
            self.running -= 1

    async def write_stream(self, request: web.BaseRequest, chat: Written) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await self.gate.wait()
        if self.preamble:
            await response.write(self.preamble)
        words = last_words(chat.messages).split()
        words = words[: chat.options.get("max_tokens", len(words))]
        for number, word in enumerate(words):
            if self.stepped:
                await self.steps.acquire()
            if number == self.break_after:
                return await self.break_stream(request, response, chat)
            if self.alive:
                await response.write(b": \n\n")
            await response.write(self.chunk(word + " " * (number + 1 < len(words)), chat))
            if self.pace_seconds:
                await asyncio.sleep(self.pace_seconds)
        await response.write(self.end(chat, len(words), "length" if "max_tokens" in chat.options else "stop"))
        chat.ended = "whole"
        return response

    def chunk(self, text: str, chat: Written) -> bytes:
        return sse_event({"text": text, "tokens": 1} | ({"logprob": -0.5} if chat.options.get("logprobs") else {}))

    def end(self, chat: Written, words: int, reason: str) -> bytes:
        images = 4 * len(chat.images)
        usage = {"prompt_tokens": 10 + images, "completion_tokens": words, "image_tokens": images}
        usage |= {"cached_tokens": 0, "text_tokens": 10}
        return sse_event({"text": "", "finish_reason": reason, "usage": usage})

    async def break_stream(
        self, request: web.BaseRequest, response: web.StreamResponse, chat: Written
    ) -> web.StreamResponse:
        chat.ended = self.breaks
        self.break_after = None
        match self.breaks:
            case "die":
                assert request.transport is not None
                request.transport.abort()
            case "error":
                await response.write(b'event: error\ndata: {"error": "logits that are none", "code": 500}\n\n')
        return response


def sse_event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def last_words(messages: Sequence[dict[str, Any]]) -> str:
    content = messages[-1]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return "".join(part["text"] for part in parts if part["type"] == "text")


def a_chat(text: str = "one two three", *images: bytes | str, **fields: Any) -> dict[str, Any]:
    shown = [{"type": "image_url", "image_url": {"url": i if isinstance(i, str) else data_url(i)}} for i in images]
    content: Any = [{"type": "text", "text": text}, *shown] if shown else text
    return {"model": "sample", "messages": [{"role": "user", "content": content}]} | fields


def data_url(file: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(file).decode()


def a_png(width: int = 8, height: int = 8) -> bytes:
    from PIL import Image  # noqa: PLC0415  (only where it is installed)

    buffer = io.BytesIO()
    Image.new("L", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def events(raw: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in raw.decode().split("\n\n") if line and not line.startswith(":")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def words_of(body: Sequence[Any], choice: int = 0) -> str:
    chosen = [each["choices"][0] for each in body if isinstance(each, dict) and each.get("choices")]
    return "".join(each["delta"].get("content", "") for each in chosen if each["index"] == choice)
