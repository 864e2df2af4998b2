"""`ChatSessions`: chats in the engine: embeddings added as they arrive, tokens streamed."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from uuid import uuid4

from trimtab_model_servers.chat.interfaces import ChatParameters
from trimtab_model_servers.chat.request_parser import ChatRow, EmbeddingLoader
from trimtab_model_servers.engine.async_engine import AsyncEngine
from trimtab_model_servers.engine.request import (
    EngineBusy,
    FinishReason,
    Image,
    Request,
    RequestDone,
    RequestError,
    TokenChunk,
)
from trimtab_model_servers.errors import RefusalError
from trimtab_protocol.chat.internal_wire import Chunk, LastChunk, Usage

log = logging.getLogger(__name__)


class ChatSessions:
    """The chats of one model; for one event loop. ``clock`` returns monotonic seconds."""

    def __init__(
        self,
        engine: AsyncEngine,
        end_ids: frozenset[int],
        parameters: ChatParameters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._end_ids = end_ids
        self._parameters = parameters
        self._clock = clock

    async def stream(self, chat: ChatRow) -> AsyncGenerator[Chunk | LastChunk, None]:
        """Answer a chat token by token; raises RefusalError. Closing the generator cancels the chat and its loaders."""
        request = self._request(chat)
        refusals: list[RefusalError] = []
        embeddings = [image.embeddings for image in chat.images]
        tasks = [asyncio.create_task(self._load(request.id, loader, refusals)) for loader in chat.loaders]
        try:
            async with contextlib.aclosing(self._engine.stream(request, embeddings)) as events:
                async for event in events:
                    if isinstance(event, TokenChunk):
                        yield Chunk(event.text, logprob=event.log_probability if chat.options.logprobs else None)
                    else:
                        _require_success(event, refusals)
                        took = event.usage
                        usage = Usage(took.prompt, took.completion, took.image, took.cached, chat.prompt.text_tokens)
                        yield LastChunk(event.text, event.finish_reason.value, usage)
        except RequestError as error:
            raise RefusalError(400, str(error)) from error
        except EngineBusy as error:
            raise RefusalError(429, str(error)) from error
        finally:
            for task in tasks:
                task.cancel()

    async def _load(self, request_id: str, loader: EmbeddingLoader, refusals: list[RefusalError]) -> None:
        """Load embeddings and add them to the engine; a failure ends only this chat."""
        try:
            embeddings = dict(zip(loader.numbers, await loader.load(), strict=True))
            self._engine.add_embeddings(request_id, embeddings)
        except RefusalError as refusal:
            refusals.append(refusal)
            self._engine.fail(request_id, str(refusal))
        except Exception as error:
            log.exception("images %s of request %s could not be loaded", loader.numbers, request_id)
            self._engine.fail(request_id, f"image {loader.numbers[0]}: {type(error).__name__}: {error}")

    def _request(self, chat: ChatRow) -> Request:
        options, prompt = chat.options, chat.prompt
        room = self._parameters.slot_tokens - len(prompt.tokens)
        max_tokens = options.max_tokens or max(min(self._parameters.max_new_tokens, room), 1)
        images = tuple(
            Image(
                image.content, span.start, span.placeholders, image.rows - image.padding, image.padding, span.segments
            )
            for image, span in zip(chat.images, prompt.image_spans, strict=True)
        )
        try:
            return Request(
                uuid4().hex,
                prompt.tokens,
                images,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens if options.ignore_eos else options.min_tokens,
                end_ids=frozenset() if options.ignore_eos else self._end_ids,
                stop_strings=options.stop,
                sampling=options.sampling,
                tenant=chat.tenant,
                due_at=self._clock() + options.deadline_seconds,
            )
        except RequestError as error:
            raise RefusalError(400, str(error)) from error


def _require_success(event: RequestDone, refusals: list[RefusalError]) -> None:
    if refusals and event.finish_reason is FinishReason.ERROR:
        raise refusals[0]
    if event.finish_reason is FinishReason.ERROR:
        raise RefusalError(500, event.error or "the model failed")
    if event.finish_reason is FinishReason.CANCELLED:
        raise RefusalError(503, "the chat was cancelled")
