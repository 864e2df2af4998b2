"""Fake engine with an OpenAI API over real HTTP, and stages for it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.builders import a_variant
from tests.router.chats import ChatReplica, Written, a_chat_pipeline, a_writer, sse_event
from trimtab_pipelines.endpoints import Endpoint
from trimtab_pipelines.spec import InferencePipeline

MODEL = "org/their-11b"
CONTAINER = {"image": "vllm:1", "port": 8000, "protocol": "OpenAI", "readyPath": "/health", "modelName": MODEL}


def a_served(name: str = "small", **changes: Any) -> dict[str, Any]:
    return a_variant(name, family="", storageUri="", container=CONTAINER | changes)


def an_engine_pipeline(**changes: Any) -> InferencePipeline:
    return a_chat_pipeline([a_writer(variants=[a_served()])], **changes)


def _chunk(delta: Mapping[str, Any], finish_reason: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason} | fields
    return sse_event({"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [choice]})


@dataclass
class Engine(ChatReplica):
    """Streams the words of the last message as chunks; `ready` it says at /health; it has one model and its adapters.

    Each of `answers` is answered once instead: a status and a body. `details` is what it tells of prompts, `last` may
    replace its last chunks. `routes` are its other paths, each with its JSON, its text, or the events of its stream.
    """

    preamble = _chunk({"role": "assistant", "content": ""})
    ready: bool = True
    kind: Any = None
    key: str = ""
    adapters: tuple[str, ...] = ()
    metrics: str = ""
    scrapes: int = 0
    answers: list[tuple[int, Any]] = field(default_factory=list)
    max_model_len: int | None = None
    details: Mapping[str, int] | None = None
    last: tuple[str, ...] | None = None
    routes: Mapping[str, Any] = field(default_factory=dict)
    forms: list[bytes] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)

    def endpoint(self, **changes: Any) -> Endpoint:
        own = {"protocol": "OpenAI", "engine": self.kind, "ready_path": "/health", "model_names": {"small": MODEL}}
        return super().endpoint(**own, **changes)

    async def answer_request(self, request: web.BaseRequest) -> web.StreamResponse:
        self.paths.add(request.path)
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path == "/health":
            self.probes += 1
            return web.Response(status=200 if self.ready else 503)
        if request.path == "/metrics":
            self.scrapes += 1
            return web.Response(text=self.metrics)
        if request.path == "/v1/models" and self.max_model_len:
            return web.json_response({"data": [{"id": MODEL, "max_model_len": self.max_model_len}]})
        if request.path != "/v1/chat/completions" and request.path not in self.routes:
            return web.json_response({"detail": "Not Found"}, status=404)
        return await self._answer(request, self.routes.get(request.path))

    async def _answer(self, request: web.BaseRequest, reply: Any) -> web.StreamResponse:
        body = await request.read()
        self.ids.append(request.headers["x-request-id"])
        self.headers = {name.lower(): value for name, value in request.headers.items()}
        if request.content_type == "multipart/form-data":
            self.forms.append(body)
            return web.Response(text=reply)
        asked = json.loads(body)
        self.asked.append(asked)
        if asked["model"] not in (MODEL, *self.adapters):
            return web.json_response({"error": {"message": f"no model {asked['model']}", "code": 404}}, status=404)
        salt = str(asked.get("cache_salt", ""))
        if len(salt) > 128 or set(salt) & {"@", "/", "\\", "\0"}:
            message = (
                "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL"
            )
            return web.json_response({"error": {"message": message, "code": 400}}, status=400)
        if self.answers:
            status, once = self.answers.pop(0)
            return web.json_response(once, status=status)
        if reply is not None:
            return await self._route(request, reply)
        chat = Written(asked["messages"], asked, [], {})
        self.written.append(chat)
        return await self._counted(request, chat)

    async def _route(self, request: web.BaseRequest, reply: Any) -> web.StreamResponse:
        if not isinstance(reply, tuple):
            return web.json_response(reply)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in reply:
            await response.write(f"data: {event}\n\n".encode())
        return response

    def chunk(self, text: str, chat: Written) -> bytes:
        likely = {"content": [{"token": text, "logprob": -0.5}]} if "logprobs" in chat.options else None
        return _chunk({"content": text}, logprobs=likely)

    def end(self, chat: Written, words: int, reason: str) -> bytes:  # noqa: ARG002 - its usage is the engine's own
        if self.last is not None:
            return b"".join(f"data: {last}\n\n".encode() for last in self.last)
        usage = {"prompt_tokens": 12, "completion_tokens": words, "total_tokens": 12 + words}
        reply = {"choices": [], "usage": usage | {"prompt_tokens_details": self.details}}
        return _chunk({}, finish_reason=reason) + sse_event(reply) + b"data: [DONE]\n\n"

    async def break_stream(
        self, request: web.BaseRequest, response: web.StreamResponse, chat: Written
    ) -> web.StreamResponse:
        if self.breaks != "error":
            return await super().break_stream(request, response, chat)
        chat.ended, self.break_after = self.breaks, None
        await response.write(
            sse_event({"error": {"message": "CUDA out of memory", "type": "server_error", "code": 500}})
        )
        return response
