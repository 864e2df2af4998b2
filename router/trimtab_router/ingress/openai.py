"""`OpenAiIngress`: `/v1/chat/completions` and `/v1/models`, for pipelines with a generation stage.

A chat is validated before anything runs, and errors have OpenAI's form. A streamed response begins with its first
chunk: an earlier error has an HTTP status, a later one is the last event of the stream.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import Any

from aiohttp import web

from trimtab_pipelines.chat_settings import ImageLimits
from trimtab_protocol import Buffer, InferRequest, PendingRequest, Tensor
from trimtab_protocol.chat import openai_responses
from trimtab_protocol.chat.chat_parser import ImageInput, ParsedChat, decode_images, parse_chat, validate_image_file
from trimtab_protocol.chat.engine_routes import ROUTES
from trimtab_protocol.chat.internal_wire import (
    IMAGES,
    OPTIONS,
    chat_tensors,
    message_values,
    options_per_choice,
    written_messages,
)
from trimtab_protocol.chat.openai_requests import ChatRequest
from trimtab_protocol.chat.openai_responses import ChunkWriter, ResponseHeader
from trimtab_protocol.errors import InvalidChat
from trimtab_protocol.rest import JSON_CONTENT_TYPE
from trimtab_protocol.sanitize import printable
from trimtab_protocol.tensors import Array
from trimtab_router.admission.memory_budget import Reservation
from trimtab_router.admission.request_parsing import parse_request
from trimtab_router.ingress.base import json_response, request_client, request_id
from trimtab_router.ingress.engine_ingress import CHAT, EngineIngress
from trimtab_router.ingress.image_fetcher import ImageFetcher
from trimtab_router.ingress.request_body import read_body
from trimtab_router.ingress.sse import SseWriter
from trimtab_router.refusal import Refusal, invalid, unknown_model
from trimtab_router.request import Call
from trimtab_router.router import Router

PREFIX = "/v1/"
_MODELS = "/v1/models"


@dataclass(frozen=True, slots=True)
class _Received:
    """A chat that was read: its request, the call, and the header of its response."""

    request: ChatRequest
    call: Call
    header: ResponseHeader


class OpenAiIngress(EngineIngress):
    """HTTP handler of OpenAI's API."""

    def __init__(self, router: Router) -> None:
        super().__init__(router)
        self._created = int(time.time())
        stages = [stage for stage in router.pipeline.spec.stages if stage.generates]
        # Trimtab's own engine may serve the chats of a third-party engine after a change of plan.
        self._mixes_engines = len({variant.forwards_chats for stage in stages for variant in stage.variants}) > 1
        self._fetcher = ImageFetcher(self._settings.images) if self._settings is not None else None

    async def route(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path.rstrip("/")
        name = self._router.pipeline.name
        if path == CHAT or path in ROUTES:
            if request.method != "POST":
                raise self._router.accounting.count_rejection(Refusal("MethodNotAllowed", f"{path} takes POST"))
            return await (self._chat(request) if path == CHAT else self.forward(request, ROUTES[path]))
        models = self._models() if self._settings is not None else {}
        if path == _MODELS:
            return json_response({"object": "list", "data": list(models.values())})
        if path.startswith(f"{_MODELS}/"):
            model = path.rpartition("/")[2]
            if model not in models:
                raise unknown_model(model, *(models or (name,)))
            return json_response(models[model])
        refusal = Refusal("NotFound", f"unknown path {printable(path, 100)}; try {self.served_routes}")
        raise self._router.accounting.count_rejection(refusal)

    def _models(self) -> dict[str, dict[str, Any]]:
        """Entries of the pipeline, and of each adapter of its engines, by name."""
        pipeline = self._router.pipeline.name
        entry = partial(openai_responses.model_entry, created=self._created, max_tokens=self._router.max_model_tokens)
        return {
            name: entry(name) | ({"parent": pipeline} if task else {}) for name, task in self._task_by_model.items()
        }

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        router, arrived_at = self._router, time.monotonic()
        with await self.admit(request, arrived_at) as reservation:
            with self.reading(request):
                chat = await self._receive(request, reservation, arrived_at)
            headers = {"x-request-id": chat.call.request_id}
            if chat.request.dry_run:
                usage = await router.count_tokens(chat.call)
                return json_response(openai_responses.dry_run_response(chat.header, usage), headers=headers)
            if chat.request.streams:
                asked = chat.request
                chunks = ChunkWriter(chat.header, includes_usage=asked.includes_usage, logprobs=bool(asked.logprobs))
                return await SseWriter(router, request, headers).write_stream(chat.call, chunks, asked.choices)
            return await self._complete(request, chat, reservation, headers)

    async def _complete(
        self, request: web.BaseRequest, chat: _Received, reservation: Reservation, headers: dict[str, str]
    ) -> web.StreamResponse:
        chat.call.last_chunks = {}
        await self._router.infer(chat.call)
        choices = [last for _, last in sorted(chat.call.last_chunks.items())]
        completion = openai_responses.completion(chat.header, choices, chat.call.variant)
        body = json.dumps(completion, ensure_ascii=False).encode()
        return self.whole(request, body, reservation, headers | {"Content-Type": JSON_CONTENT_TYPE})

    async def _receive(self, request: web.BaseRequest, reservation: Reservation, arrived_at: float) -> _Received:
        """Read a chat. Raises InvalidChat or Refusal, not counted yet."""
        router, settings = self._router, self._settings
        if settings is None:
            raise Refusal("NoChats", f"{router.pipeline.name} serves no chats; use /v2")
        body = await read_body(request, reservation, router.limits.max_payload_bytes, router.admission.uploads)
        chat, images = await self._turns.run(len(body), partial(self._parse_images, body, settings.images, reservation))
        files = await self._fetch_files(images, reservation)
        call_id = request_id(request) or token_hex(16)
        chat_request = self._request(chat, files, request_client(request), call_id)
        call = parse_request(router.pipeline.name, router.pipeline.spec, PendingRequest.of(chat_request))
        self.describe(call, request, reservation, arrived_at, call_id)
        header = ResponseHeader(f"chatcmpl-{call_id}", chat.request.model, int(time.time()))
        return _Received(chat.request, call, header)

    def _parse_images(
        self, body: Buffer, bounds: ImageLimits, reservation: Reservation
    ) -> tuple[ParsedChat, list[bytes | ImageInput]]:
        """Parse a chat for this pipeline, and decode its images. Raises InvalidChat or Refusal."""
        chat = self._parse(body, bounds)
        self._task_parameters(chat.request.model)  # before its images are decoded
        if (chat.images or chat.media) and IMAGES not in self._inputs:
            raise invalid(f"{self._router.pipeline.name} accepts no images")
        reservation.grow(chat.image_bytes)
        return chat, list(decode_images(chat, bounds))

    def _parse(self, body: Buffer, bounds: ImageLimits) -> ParsedChat:
        """Parse a chat, as written if a third-party engine alone can serve it. Raises InvalidChat."""
        parse, router = partial(parse_chat, body, self._router.limits.json_bytes, bounds), self._router
        if router.forwards_chats and not self._mixes_engines:
            return parse(forwarded=True)
        try:
            return parse()
        except InvalidChat:
            if router.forwards_chats:
                return parse(forwarded=True)
            raise

    async def _fetch_files(self, images: Sequence[bytes | ImageInput], reservation: Reservation) -> list[bytes]:
        """Files of images, of which some are given by URL."""
        missing = [image for image in images if isinstance(image, ImageInput)]
        if not missing:
            return [image for image in images if isinstance(image, bytes)]
        assert self._fetcher is not None  # noqa: S101 - there are settings
        assert self._settings is not None  # noqa: S101
        limits, fetched = self._settings.images, iter(await self._fetcher.fetch(missing, reservation))
        return [
            image if isinstance(image, bytes) else validate_image_file(next(fetched), image.field, limits)
            for image in images
        ]

    def _request(self, chat: ParsedChat, files: Sequence[bytes], tenant: str, call_id: str) -> InferRequest:
        forwarded = chat.messages is not None
        options = options_per_choice(chat.request, tenant=tenant, forwarded=forwarded)
        messages = written_messages(chat.messages) if chat.messages else message_values(chat.request.messages)
        tensors: dict[str, Array] = chat_tensors(messages, files, options, chat.media)
        if OPTIONS not in self._inputs:
            del tensors[OPTIONS]
        return InferRequest(
            model_name=self._router.pipeline.name,
            inputs=tuple(Tensor(name, self._inputs[name], array) for name, array in tensors.items()),
            id=call_id,
            parameters=self._task_parameters(chat.request.model),
        )
