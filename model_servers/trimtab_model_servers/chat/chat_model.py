"""A model that answers chats, with its encoder or without, in one replica."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any

from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.chat.config import ChatComponents
from trimtab_model_servers.chat.embedding_client import EmbeddingClient
from trimtab_model_servers.chat.encoder_scheduler import EncoderScheduler, done_by
from trimtab_model_servers.chat.encoder_scheduler import Limits as EncodingLimits
from trimtab_model_servers.chat.interfaces import ChatTokenizer
from trimtab_model_servers.chat.pending_images import PendingImages
from trimtab_model_servers.chat.request_parser import ChatRow, Sources, chats_of
from trimtab_model_servers.chat.responses import FinishEvent, TokenEvent, tensors_of
from trimtab_model_servers.chat.sessions import ChatSessions, TokenLimits
from trimtab_model_servers.chat.warmup import warm_up
from trimtab_model_servers.engine.async_engine import AsyncEngine, spelling
from trimtab_model_servers.engine.core import EngineCore
from trimtab_model_servers.engine.model_adapters import ModelAdapter
from trimtab_model_servers.engine.scheduler import Limits
from trimtab_model_servers.errors import RefusalError
from trimtab_model_servers.model_metadata import Fact, Weights, metadata_facts, metadata_of, response_parameters
from trimtab_model_servers.request_validation import chosen_outputs, chosen_point, validate_rows
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_protocol import InferRequest, InferResponse
from trimtab_protocol.chat.embedding_refs import CountedChat
from trimtab_protocol.chat.internal_wire import READS_AHEAD

OPENING_THREADS = 2


class ChatModel:
    """One model with its engine; ``worker`` computes for its encoder, if it has one, ``puller`` fetches from others."""

    def __init__(
        self,
        spec: ModelSpec,
        built: ChatComponents,
        parts: tuple[ChatTokenizer, ModelAdapter],
        worker: BatchWorker,
        puller: EmbeddingClient,
    ) -> None:
        self.spec = spec
        self.weights: Weights = built.weights
        self._writing, family = parts
        self._facts = {**built.facts, READS_AHEAD: not family.across}
        self.slots = built.parameters.slots
        core = EngineCore(family, _limits(built, across=family.across), spelling=spelling(self._writing.tokenizer))
        self.engine = AsyncEngine(core, threads=spec.threads)
        self.encoding = _encoding(built, worker)
        self.puller = puller
        lengths = TokenLimits(built.parameters.max_new_tokens, built.parameters.slot_tokens)
        self._talks = ChatSessions(self.engine, self._writing, lengths)
        self.coming = PendingImages()
        self._sources = Sources(self.encoding, self.puller.pull, family.width, self.coming)

    def warm_up(self) -> None:
        """Answer once, about an image where there is an encoder; raises ModelError where that fails. Blocks."""
        warm_up(self.spec, self.engine, self._writing, self.encoding.seeing if self.encoding else None)

    async def infer(self, request: InferRequest, worker: BatchWorker) -> InferResponse:
        """Answer all rows of a request, side by side.

        Raises:
            RefusalError: 400, 413 or 422 what does not fit; 429 as many wait as may; 500, 502 or 503 what failed.
        """
        with self._reading(request, worker) as chats:
            wanted, began = chosen_outputs(self.spec, request.requested_outputs), perf_counter()
            answers = await _side_by_side(self._answer(chat) for chat in chats)
            outputs = tuple(tensor for tensor in tensors_of(answers) if tensor.name in wanted)
            told = response_parameters(self.spec, perf_counter() - began)
        return InferResponse(model_name=self.spec.name, outputs=outputs, id=request.id, parameters=told)

    async def stream(
        self, request: InferRequest, worker: BatchWorker
    ) -> AsyncGenerator[TokenEvent | FinishEvent, None]:
        """Answer the only row of a request, word by word; errors as of ``infer``."""
        with self._reading(request, worker) as chats:
            if len(chats) != 1:
                raise RefusalError(400, f"a stream answers one chat, but {len(chats)} rows came")
            async with contextlib.aclosing(self._talks.words(chats[0])) as words:
                async for word in words:
                    yield word

    def count(self, request: InferRequest) -> CountedChat:
        """Tell what the only row of a request would cost, in tokens; errors as of ``infer``."""
        validate_rows(self.spec, request.inputs)
        chat = chats_of(request, self._sources)[0]
        prompt = self._talks.prompt(chat)
        return CountedChat(
            prompt_tokens=len(prompt.tokens),
            text_tokens=prompt.text_tokens,
            image_tokens=tuple(place.placeholders for place in prompt.places),
            encoded_tokens=tuple(image.rows for image in chat.images),
        )

    @property
    def failure(self) -> Future[str]:
        """Why it will never answer again, once its engine has failed itself."""
        return self.engine.failure

    def pending(self) -> dict[str, int]:
        """What is in flight; see docs/develop/chat-stages.md."""
        gauges, encoding = self.engine.gauges, self.encoding
        return {
            "waiting": gauges.waiting,
            "running": gauges.running,
            "text_tokens": gauges.pending_tokens,
            "image_tokens": encoding.counts.pending_tokens if encoding else 0,
            "slots": self.slots,
            "busy_slots": gauges.busy_slots,
            "embedding_bytes": gauges.embedding_bytes,
            "kept": 0,
        }

    def done(self) -> dict[str, float]:
        """What it has done since it started."""
        encoded = done_by(self.encoding) if self.encoding else {}
        pulled = {"pulled_bytes": self.puller.pulled_bytes, "pull_seconds": self.puller.seconds}
        return {"steps": self.engine.gauges.steps, **encoded, **pulled}

    def metadata(self) -> dict[str, object]:
        """The protocol's model metadata, with our own facts under `parameters`."""
        return metadata_of(self.spec, self.facts())

    def facts(self) -> dict[str, Fact]:
        """What this model is, beyond its tensors."""
        return metadata_facts(self.spec, self.weights, self._facts)

    async def close(self) -> None:
        """Serve what was taken in to its end, and stop."""
        await asyncio.to_thread(self.engine.stop)
        await self.puller.close()

    @contextlib.contextmanager
    def _reading(self, request: InferRequest, worker: BatchWorker) -> Iterator[list[ChatRow]]:
        """A request's chats, counted as work while they are answered."""
        validate_rows(self.spec, request.inputs)
        chosen_point(self.spec, request.parameters)
        with worker.elsewhere():
            yield chats_of(request, self._sources)

    async def _answer(self, chat: ChatRow) -> tuple[str, FinishEvent]:
        said = []
        async with contextlib.aclosing(self._talks.words(chat)) as words:
            async for word in words:
                said.append(word.text)
                if isinstance(word, FinishEvent):
                    return "".join(said), word
        raise RefusalError(500, "an answer ended without a last word")


async def _side_by_side(
    answers: Iterable[Coroutine[Any, Any, tuple[str, FinishEvent]]],
) -> list[tuple[str, FinishEvent]]:
    """Wait for all; the first that fails ends the others."""
    tasks = [asyncio.create_task(answer) for answer in answers]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _limits(built: ChatComponents, *, across: bool) -> Limits:
    asked = built.parameters
    return Limits(asked.slots, asked.slot_tokens, asked.step_tokens, asked.waiting, asked.image_tokens if across else 0)


def _encoding(built: ChatComponents, worker: BatchWorker) -> EncoderScheduler | None:
    if built.seeing is None:
        return None
    openers = ThreadPoolExecutor(OPENING_THREADS, thread_name_prefix="opening")
    limits = EncodingLimits(built.parameters.batch_images, built.parameters.cache_bytes)
    return EncoderScheduler(built.seeing, worker, openers, limits)
