"""`EngineIngress`: routes that only a third-party engine serves, under the admission and scheduling of chats."""

import time
from collections.abc import Mapping
from functools import partial
from secrets import token_hex

from aiohttp import web

from trimtab_pipelines.chat_settings import ChatSettings
from trimtab_pipelines.request_outcome import ErrorCode
from trimtab_protocol import InferRequest, PendingRequest, Tensor
from trimtab_protocol.chat.engine_responses import ForwardedChunkWriter, whole_response
from trimtab_protocol.chat.engine_routes import ROUTES, EngineRoute, parse_engine_request
from trimtab_protocol.chat.internal_wire import MESSAGES, OPTIONS, bytes_tensor
from trimtab_protocol.extensions import TASK
from trimtab_protocol.messages import Parameters
from trimtab_router.admission.memory_budget import Reservation
from trimtab_router.admission.parsing_turns import ParsingTurns
from trimtab_router.admission.request_parsing import parse_request
from trimtab_router.ingress.base import Ingress, abort_connection, error_response, request_id
from trimtab_router.ingress.engine_forms import parse_engine_form
from trimtab_router.ingress.request_body import read_body
from trimtab_router.ingress.sse import SseWriter, sse_error
from trimtab_router.refusal import Refusal, unknown_model
from trimtab_router.request import Call
from trimtab_router.router import Router

CHAT = "/v1/chat/completions"
_NOT_RETRYABLE = frozenset({ErrorCode.DEADLINE_EXCEEDED, ErrorCode.INTERNAL, ErrorCode.UNIMPLEMENTED})
"""Codes that clients should not retry. OpenAI's client otherwise retries twice."""


class EngineIngress(Ingress):
    """Base of OpenAI's API: its errors and whole responses, and the routes beside chats."""

    def __init__(self, router: Router) -> None:
        super().__init__(router)
        self._settings: ChatSettings | None = router.pipeline.spec.chat_settings
        self._inputs = {tensor.name: tensor.datatype for tensor in router.pipeline.spec.inputs}
        variants = (variant for stage in router.pipeline.spec.stages for variant in stage.variants)
        tasks = sorted({task for variant in variants for task in variant.adapters})
        self._task_by_model = {self._model_of(task): task for task in ("", *tasks)}
        self._turns = ParsingTurns()

    def refuse(self, request: web.BaseRequest, refusal: Refusal) -> web.Response:
        response = error_response(request, refusal, sse_error(refusal))
        response.headers["x-request-id"] = request_id(request)
        if refusal.retry_after_seconds is None and refusal.code in _NOT_RETRYABLE:
            response.headers["x-should-retry"] = "false"
        return response

    @property
    def served_routes(self) -> str:
        return ", ".join((CHAT, *ROUTES)) if self._router.forwards_routes else CHAT

    async def forward(self, request: web.BaseRequest, route: EngineRoute) -> web.StreamResponse:
        router, arrived_at = self._router, time.monotonic()
        with await self.admit(request, arrived_at) as reservation:
            with self.reading(request):
                call = await self._receive_forwarded(request, route, reservation, arrived_at)
            headers, model = {"x-request-id": call.request_id}, self._model_of(call.options.task)
            if call.forwarded is not None and call.forwarded.streams:
                chunks = ForwardedChunkWriter(call.forwarded, model)
                return await SseWriter(router, request, headers).write_stream(call, chunks, 0)
            call.last_chunks = {}
            await router.infer(call)
            content_type, body = whole_response(call.last_chunks[0], model)
            return self.whole(request, body, reservation, headers | {"Content-Type": content_type})

    def _task_parameters(self, model: str) -> Parameters:
        """The request parameter of the task that a model name selects. Raises Refusal for an unknown model."""
        task = self._task_by_model.get(model)
        if task is None:
            raise unknown_model(model, *self._task_by_model)
        return {TASK: task} if task else {}

    def _model_of(self, task: str) -> str:
        name = self._router.pipeline.name
        return f"{name}:{task}" if task else name

    def whole(
        self, request: web.BaseRequest, body: bytes, reservation: Reservation, headers: Mapping[str, str]
    ) -> web.Response:
        reservation.hold_response(len(body), lambda: abort_connection(request))
        return web.Response(body=body, headers=headers)

    async def _receive_forwarded(
        self, request: web.BaseRequest, route: EngineRoute, reservation: Reservation, arrived_at: float
    ) -> Call:
        """Read a request. Raises InvalidChat or Refusal, not counted yet."""
        router, settings, name = self._router, self._settings, self._router.pipeline.name
        if settings is None or not router.forwards_routes:
            offers = "/v2" if settings is None else f"{CHAT}; only third-party engines serve other routes"
            raise Refusal("RouteNotServed", f"{name} does not serve {route.path}; use {offers}")
        body = await read_body(request, reservation, router.limits.max_payload_bytes, router.admission.uploads)
        reservation.grow(len(body))  # for a copy
        if route.form:
            parsed = await parse_engine_form(route, body, request.headers)
        else:
            parse = partial(parse_engine_request, route, body, router.limits.json_bytes, settings.images)
            parsed = await self._turns.run(len(body), parse)
        parameters = self._task_parameters(parsed.model or name)
        call_id = request_id(request) or token_hex(16)
        values = {MESSAGES: parsed.body, OPTIONS: b"{}"}
        tensors = [Tensor(key, self._inputs[key], bytes_tensor([values[key]])) for key in values if key in self._inputs]
        engine_request = InferRequest(model_name=name, inputs=tuple(tensors), id=call_id, parameters=parameters)
        pending = PendingRequest.of(engine_request)
        call = parse_request(name, router.pipeline.spec, pending)
        call.forwarded = parsed.forwarded
        self.describe(call, request, reservation, arrived_at, call_id)
        return call
