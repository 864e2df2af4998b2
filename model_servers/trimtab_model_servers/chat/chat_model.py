"""`ChatModel`: a generation model in one replica, with or without its own encoder."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Iterable
from concurrent.futures import Future
from time import perf_counter
from typing import Any

from trimtab_model_servers import model_protocol
from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.chat.embedding_client import EmbeddingClient
from trimtab_model_servers.chat.embedding_store import PendingImages
from trimtab_model_servers.chat.encoder_scheduler import EncoderScheduler
from trimtab_model_servers.chat.interfaces import ChatComponents, ChatTokenizer
from trimtab_model_servers.chat.request_parser import ChatRow, ImageSources, RequestParser
from trimtab_model_servers.chat.sessions import ChatSessions
from trimtab_model_servers.chat.warmup import warm_up
from trimtab_model_servers.engine.async_engine import AsyncEngine, detokenizer_factory
from trimtab_model_servers.engine.core import EngineCore
from trimtab_model_servers.engine.model_adapters import ModelAdapter
from trimtab_model_servers.engine.scheduler import EngineLimits
from trimtab_model_servers.errors import RefusalError
from trimtab_model_servers.model_protocol import Fact, Weights
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_protocol import InferRequest, InferResponse, Tensor
from trimtab_protocol.chat.embedding_refs import ChatTokenCounts
from trimtab_protocol.chat.internal_wire import (
    MAX_PROMPT_TOKENS,
    PARTIAL_PREFILL,
    Chunk,
    LastChunk,
    outputs_from_responses,
)


class ChatModel:
    """One model with its engine; ``worker`` computes for its encoder, if it has one."""

    def __init__(
        self,
        spec: ModelSpec,
        components: ChatComponents,
        generator: tuple[ChatTokenizer, ModelAdapter],
        worker: BatchWorker,
        embedding_client: EmbeddingClient,
    ) -> None:
        self.spec = spec
        self.weights: Weights = components.weights
        self.tokenizer, adapter = generator
        self._max_prompt_tokens = components.parameters.slot_tokens - 1  # and one new token
        own_facts = {PARTIAL_PREFILL: not adapter.cross_attention, MAX_PROMPT_TOKENS: self._max_prompt_tokens}
        self._facts = {**components.facts, **own_facts}
        self.slots = components.parameters.slots
        limits = _engine_limits(components, cross_attention=adapter.cross_attention)
        core = EngineCore(adapter, limits, new_detokenizer=detokenizer_factory(self.tokenizer.tokenizer))
        self.engine = AsyncEngine(core, threads=spec.threads)
        self.encoder_scheduler = _encoder_scheduler(components, worker)
        self.embedding_client = embedding_client
        self._sessions = ChatSessions(self.engine, self.tokenizer.end_ids, components.parameters)
        self.pending_images = PendingImages()
        sources = ImageSources(self.encoder_scheduler, embedding_client.fetch, adapter.width, self.pending_images)
        self._parser = RequestParser(sources, self.tokenizer, components.parameters.slot_tokens)

    def warm_up(self) -> None:
        """Run a first chat; raises ModelError if that fails. Blocks."""
        scheduler = self.encoder_scheduler
        warm_up(self.spec, self.engine, self.tokenizer, scheduler.encoder if scheduler else None)

    async def infer(self, request: InferRequest, worker: BatchWorker) -> InferResponse:
        """Answer all rows concurrently; RefusalError 4xx for an invalid request or a full queue, 5xx on failure."""
        async with self._chats(request, worker) as chats:
            names, began = model_protocol.select_outputs(self.spec, request.requested_outputs), perf_counter()
            responses = await _gather(self._answer(chat) for chat in chats)
            arrays = outputs_from_responses(responses)
            outputs = tuple(Tensor.of(name, array) for name, array in arrays.items() if name in names)
            parameters = model_protocol.response_parameters(self.spec, perf_counter() - began)
        return InferResponse(model_name=self.spec.name, outputs=outputs, id=request.id, parameters=parameters)

    async def stream(self, request: InferRequest, worker: BatchWorker) -> AsyncGenerator[Chunk | LastChunk, None]:
        """Answer a single-row request token by token; errors as of ``infer``."""
        async with self._chats(request, worker) as chats:
            if len(chats) != 1:
                raise RefusalError(400, f"a stream answers one chat, but {len(chats)} rows came")
            async with contextlib.aclosing(self._sessions.stream(chats[0])) as events:
                async for event in events:
                    yield event

    async def count(self, request: InferRequest) -> ChatTokenCounts:
        """Tokens of a single-row request; errors as of ``infer``."""
        model_protocol.validate_rows(self.spec, request.inputs)
        chat = (await self._parser.parse(request))[0]
        prompt = chat.prompt
        if len(prompt.tokens) > self._max_prompt_tokens:
            message = f"the prompt has {len(prompt.tokens)} tokens; should be at most {self._max_prompt_tokens}"
            raise RefusalError(400, message)
        return ChatTokenCounts(
            prompt_tokens=len(prompt.tokens),
            text_tokens=prompt.text_tokens,
            image_tokens=tuple(span.placeholders for span in prompt.image_spans),
            encoded_tokens=tuple(image.rows for image in chat.images),
        )

    @property
    def failure(self) -> Future[str]:
        """Done once the engine itself has failed; holds the reason."""
        return self.engine.failure

    def pending(self) -> dict[str, int]:
        gauges, scheduler = self.engine.gauges, self.encoder_scheduler
        return {
            "waiting": gauges.waiting,
            "running": gauges.running,
            "text_tokens": gauges.pending_tokens,
            "image_tokens": scheduler.counters.pending_tokens if scheduler else 0,
            "slots": self.slots,
            "busy_slots": gauges.busy_slots,
            "embedding_bytes": gauges.embedding_bytes,
            "stored_embeddings": 0,
        }

    def totals(self) -> dict[str, float]:
        encoder = self.encoder_scheduler.totals() if self.encoder_scheduler else {}
        client = self.embedding_client
        transfers = {"fetched_bytes": client.fetched_bytes, "fetch_seconds": client.fetch_seconds}
        return {"steps": self.engine.gauges.steps, **encoder, **transfers}

    def facts(self) -> dict[str, Fact]:
        return model_protocol.metadata_facts(self.spec, self.weights, self._facts)

    async def close(self) -> None:
        await asyncio.to_thread(self.engine.stop)
        await self.embedding_client.close()

    @contextlib.asynccontextmanager
    async def _chats(self, request: InferRequest, worker: BatchWorker) -> AsyncGenerator[list[ChatRow], None]:
        """The chats of a request; a drain waits until the context ends."""
        model_protocol.validate_rows(self.spec, request.inputs)
        model_protocol.select_operating_point(self.spec, request.parameters)
        with worker.external_work():
            yield await self._parser.parse(request)

    async def _answer(self, chat: ChatRow) -> tuple[str, LastChunk]:
        texts = []
        async with contextlib.aclosing(self._sessions.stream(chat)) as events:
            async for event in events:
                texts.append(event.text)
                if isinstance(event, LastChunk):
                    return "".join(texts), event
        raise RefusalError(500, "the response ended without a last event")


async def _gather(answers: Iterable[Coroutine[Any, Any, tuple[str, LastChunk]]]) -> list[tuple[str, LastChunk]]:
    """Wait for all answers; the first failure cancels the others."""
    tasks = [asyncio.create_task(answer) for answer in answers]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _engine_limits(components: ChatComponents, *, cross_attention: bool) -> EngineLimits:
    parameters = components.parameters
    image_tokens = parameters.image_tokens if cross_attention else 0
    return EngineLimits(
        parameters.slots, parameters.slot_tokens, parameters.step_tokens, parameters.max_waiting, image_tokens
    )


def _encoder_scheduler(components: ChatComponents, worker: BatchWorker) -> EncoderScheduler | None:
    if components.encoder is None:
        return None
    parameters = components.parameters
    return EncoderScheduler(components.encoder, worker, parameters.batch_images, parameters.cache_bytes)
