"""OpenAI's front door: `/v1/chat/completions` and `/v1/models`, for pipelines whose answers a stage writes.

What is wrong with a chat is said before anything runs, in the client's own form. An answer in parts begins with its
first piece: what goes wrong before has a status, what goes wrong after is the stream's last event.
"""

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from secrets import token_hex

from aiohttp import web

from trimtab_pipelines.chat_settings import ChatSettings
from trimtab_pipelines.error_codes import ErrorCode
from trimtab_protocol import InferRequest, Tensor
from trimtab_protocol.chat import openai_responses
from trimtab_protocol.chat.chat_parser import ImageInput, checked_file, decoded, parse_chat
from trimtab_protocol.chat.errors import InvalidChat
from trimtab_protocol.chat.internal_wire import IMAGES, OPTIONS, Chunk, LastChunk, answers_of, options_of, tensors_of
from trimtab_protocol.chat.openai_requests import ChatRequest
from trimtab_protocol.chat.openai_responses import Choice, ResponseHeader
from trimtab_protocol.extensions import REASON_HEADER, STAGE_HEADER
from trimtab_protocol.sanitize import printable
from trimtab_protocol.tensors import Array
from trimtab_router.admission.call import Call
from trimtab_router.admission.memory_budget import Reservation
from trimtab_router.ingress.image_fetcher import ImageFetcher
from trimtab_router.ingress.request_body import read_body
from trimtab_router.ingress.request_parsing import client, client_disconnected, request_id
from trimtab_router.ingress.sse import SseWriter, sse_error
from trimtab_router.refusal import Refusal, failure, invalid, malformed, not_found, wrong_method
from trimtab_router.router import Router

log = logging.getLogger(__name__)

PREFIX = "/v1/"
_CHAT, _MODELS = "/v1/chat/completions", "/v1/models"
_HOPELESS = frozenset({ErrorCode.DEADLINE_EXCEEDED, ErrorCode.INTERNAL, ErrorCode.UNIMPLEMENTED})
"""What clients need not try again: they would by themselves, twice."""


@dataclass(frozen=True, slots=True)
class _Received:
    """A chat that was read: what is asked, its call, and what its answer is headed with."""

    asked: ChatRequest
    call: Call
    heading: ResponseHeader


class OpenAiIngress:
    """The HTTP handler, over a router."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._settings: ChatSettings | None = router.pipeline.spec.chats
        self._created = int(time.time())
        self._fetcher = ImageFetcher(self._settings.images) if self._settings is not None else None
        self._inputs = {each.name: each.datatype for each in router.pipeline.spec.inputs}

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Serve a request."""
        response = await self._response(request)
        if self._router.leaving:
            response.force_close()  # so that the caller's next request finds another router
        return response

    async def _response(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._route(request)
        except Refusal as refusal:
            return _refused(request, refusal)
        except ConnectionError:
            raise
        except web.HTTPException as error:
            return _json(openai_responses.error(error.status, error.text or error.reason), error.status)
        except Exception:
            log.exception("%s %s failed", printable(request.method, 100), printable(request.path, 200))
            return _refused(request, failure("InternalError", "the request failed", request_id(request)))

    async def _route(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path.rstrip("/")
        name = self._router.pipeline.name
        if path == _CHAT:
            if request.method != "POST":
                raise self._router.accounts.turned_away(wrong_method(f"{_CHAT} takes POST"))
            return await self._chat(request)
        own = openai_responses.model(name, self._created)
        if path == _MODELS:
            return _json(openai_responses.models([own] if self._settings is not None else []))
        if path == f"{_MODELS}/{name}" and self._settings is not None:
            return _json(own)
        if path.startswith(f"{_MODELS}/"):
            raise _unknown(path.rpartition("/")[2], name)
        raise self._router.accounts.turned_away(not_found(f"nothing at {printable(path, 100)}; try {_CHAT}"))

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        router, arrived_at = self._router, time.monotonic()
        with await router.admit(arrived_at, client(request)) as reservation:
            try:
                chat = await self._receive(request, reservation, arrived_at)
            except InvalidChat as error:
                raise router.accounts.turned_away(malformed(error)) from error
            except Refusal as refusal:
                raise router.accounts.turned_away(refusal) from refusal.__cause__
            except Exception as error:
                log.exception("a chat cannot be read")
                unread = failure("InternalError", "the chat cannot be read", request_id(request))
                raise router.accounts.turned_away(unread) from error
            headers = {"x-request-id": chat.call.request_id}
            if chat.asked.dry_run:
                took = await router.count(chat.call)
                return _json(openai_responses.counted(chat.heading, took), headers=headers)
            if chat.asked.streams:
                return await SseWriter(router, request, headers).tell(chat.asked, chat.call, chat.heading)
            return await self._whole(request, chat, reservation, headers)

    async def _whole(
        self, request: web.BaseRequest, chat: _Received, reservation: Reservation, headers: dict[str, str]
    ) -> web.StreamResponse:
        pieces: dict[int, list[Chunk]] = {}

        def hear(row: int, piece: Chunk | LastChunk) -> None:
            if isinstance(piece, Chunk):
                pieces.setdefault(row, []).append(piece)

        # Who listens gets no second answer, so nobody does who need not.
        call = replace(chat.call, listener=hear) if chat.asked.logprobs else chat.call
        response = await self._router.infer(call)
        outputs = {tensor.name: tensor.array for tensor in response.outputs}
        choices = [Choice(answer, pieces.get(row)) for row, answer in enumerate(answers_of(outputs))]
        body = json.dumps(openai_responses.completion(chat.heading, choices), ensure_ascii=False).encode()
        reservation.deliver(len(body), lambda: client_disconnected(request))
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def _receive(self, request: web.BaseRequest, reservation: Reservation, arrived_at: float) -> _Received:
        """Read a chat; raises InvalidChat or Refusal, not counted yet."""
        router, settings = self._router, self._settings
        if settings is None:
            raise Refusal(ErrorCode.NOT_FOUND, "NoChats", f"{router.pipeline.name} answers no chats; use /v2")
        body = await read_body(request, reservation, router.limits.max_payload_bytes, router.body_seconds)
        chat = parse_chat(body, router.limits.json_bytes, settings.images)
        if chat.asked.model != router.pipeline.name:
            raise _unknown(chat.asked.model, router.pipeline.name)
        if chat.images and IMAGES not in self._inputs:
            raise invalid(f"{router.pipeline.name} takes no images")
        reservation.grow(chat.image_bytes)
        files = [await self._file(file, reservation) for file in decoded(chat, settings.images)]
        given = request_id(request) or token_hex(16)
        return _Received(
            chat.asked,
            Call(
                self._request(chat.asked, files, client(request), given),
                arrived_at,
                request_id=given,
                trace_parent=request.headers.get("traceparent", ""),
                reservation=reservation,
            ),
            ResponseHeader(f"chatcmpl-{given}", router.pipeline.name, int(time.time())),
        )

    async def _file(self, file: bytes | ImageInput, reservation: Reservation) -> bytes:
        if isinstance(file, bytes):
            return file
        assert self._fetcher is not None  # noqa: S101 - there are settings
        assert self._settings is not None  # noqa: S101
        fetched = await self._fetcher.fetch(file.address, file.field, reservation)
        return checked_file(fetched, file.field, self._settings.images)

    def _request(self, asked: ChatRequest, files: Sequence[bytes], tenant: str, given: str) -> InferRequest:
        options = options_of(asked, tenant=tenant)
        tensors: dict[str, Array] = tensors_of(asked, files, options)
        if OPTIONS not in self._inputs:
            del tensors[OPTIONS]
        return InferRequest(
            model_name=self._router.pipeline.name,
            inputs=tuple(Tensor(name, self._inputs[name], array) for name, array in tensors.items()),
            id=given,
        )


def _unknown(model: str, name: str) -> Refusal:
    return Refusal(ErrorCode.NOT_FOUND, "UnknownModel", f"unknown model {model!r}; this router serves {name!r}")


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = json.dumps(content, ensure_ascii=False).encode()
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def _refused(request: web.BaseRequest, refusal: Refusal) -> web.Response:
    response = _json(sse_error(refusal), refusal.code.value)
    response.headers[REASON_HEADER] = refusal.reason
    response.headers["x-request-id"] = request_id(request)
    if refusal.stage:
        response.headers[STAGE_HEADER] = refusal.stage
    if refusal.retry_after_seconds is not None:
        response.headers["Retry-After"] = str(max(1, round(refusal.retry_after_seconds)))
    elif refusal.code in _HOPELESS:
        response.headers["x-should-retry"] = "false"
    if not request.content.is_eof():
        response.force_close()  # the rest of the body is not worth reading
    return response
