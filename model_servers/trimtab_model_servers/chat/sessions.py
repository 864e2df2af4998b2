"""Chats under way in an engine: prompts spelled, images brought as they become ready, words told as they come."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from uuid import uuid4

from trimtab_model_servers.chat.interfaces import ChatTokenizer, Prompt, Rows
from trimtab_model_servers.chat.request_parser import ChatRow, Fetch
from trimtab_model_servers.chat.responses import FinishEvent, TokenEvent, chunk_event, last_of
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

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """How long an answer may be: by default, and together with its prompt."""

    default_new_tokens: int
    slot_tokens: int


class ChatSessions:
    """The chats of one model; called on one event loop.

    Args:
        engine: writes their answers.
        writing: how the model spells.
        lengths: of answers.
        clock: tells monotonic seconds; what a chat says of its urgency counts from when it comes.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        writing: ChatTokenizer,
        lengths: TokenLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._writing = writing
        self._lengths = lengths
        self._clock = clock

    def prompt(self, chat: ChatRow) -> Prompt:
        """Spell a chat; raises RefusalError 400 where the model has no form for it."""
        return self._writing.prompt(
            chat.messages, [Rows(image.rows, image.padding, image.columns) for image in chat.images]
        )

    async def words(self, chat: ChatRow) -> AsyncGenerator[TokenEvent | FinishEvent, None]:
        """Answer a chat, word by word; who stops listening cancels it and all that is done for it.

        Raises:
            RefusalError: the engine refused it, an image could not be had, or the model failed.
        """
        prompt = self.prompt(chat)
        request = self._request(chat, prompt)
        failed: list[RefusalError] = []
        there = [shown.held for shown in chat.images]
        bringing = [asyncio.create_task(self._bring(request.id, fetch, failed)) for fetch in chat.fetches]
        try:
            async with contextlib.aclosing(self._engine.stream(request, there)) as events:
                async for event in events:
                    if isinstance(event, TokenChunk):
                        yield chunk_event(event, logprobs=chat.options.logprobs)
                    else:
                        _require_answered(event, failed)
                        yield last_of(event, prompt.text_tokens)
        except RequestError as error:
            raise RefusalError(400, str(error)) from error
        except EngineBusy as error:
            raise RefusalError(429, str(error)) from error
        finally:
            for task in bringing:
                task.cancel()

    async def _bring(self, request_id: str, fetch: Fetch, failed: list[RefusalError]) -> None:
        """Have images encoded or pulled, and hand them to the engine; an image that fails ends its chat alone."""
        try:
            self._engine.supply(request_id, dict(zip(fetch.numbers, await fetch.bring(), strict=True)))
        except RefusalError as refusal:
            failed.append(refusal)
            self._engine.fail(request_id, str(refusal))
        except Exception as error:
            log.exception("images %s of request %s could not be had", fetch.numbers, request_id)
            self._engine.fail(request_id, f"image {fetch.numbers[0]}: {type(error).__name__}: {error}")

    def _request(self, chat: ChatRow, prompt: Prompt) -> Request:
        options, room = chat.options, self._lengths.slot_tokens - len(prompt.tokens)
        most = options.max_tokens or max(min(self._lengths.default_new_tokens, room), 1)
        images = tuple(
            Image(
                shown.content, place.start, place.placeholders, shown.rows - shown.padding, shown.padding, place.pieces
            )
            for shown, place in zip(chat.images, prompt.places, strict=True)
        )
        try:
            return Request(
                uuid4().hex,
                prompt.tokens,
                images,
                max_new_tokens=most,
                min_new_tokens=most if options.ignore_eos else options.min_tokens,
                end_ids=frozenset() if options.ignore_eos else self._writing.end_ids,
                stops=options.stop,
                sampling=options.sampling,
                tenant=options.tenant,
                due_at=self._clock() + options.urgency_seconds,
            )
        except RequestError as error:
            raise RefusalError(400, str(error)) from error


def _require_answered(event: RequestDone, failed: list[RefusalError]) -> None:
    if failed and event.ending is FinishReason.ERROR:
        raise failed[0]
    if event.ending is FinishReason.ERROR:
        raise RefusalError(500, event.error or "the model failed")
    if event.ending is FinishReason.CANCELLED:
        raise RefusalError(503, "the chat was cancelled")
