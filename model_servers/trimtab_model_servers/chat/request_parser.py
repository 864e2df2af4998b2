"""`RequestParser`: parses an inference request's tensors into chats with their prompts, one per row, in threads."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Final
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from trimtab_model_servers.chat import messages
from trimtab_model_servers.chat.embedding_client import EmbeddingRequest
from trimtab_model_servers.chat.embedding_store import PendingImages
from trimtab_model_servers.chat.encoder_scheduler import EncoderScheduler
from trimtab_model_servers.chat.image_decoder import ImageFile, read_image
from trimtab_model_servers.chat.interfaces import ChatTokenizer, EmbeddingShape, Prompt
from trimtab_model_servers.chat.messages import Message, Options
from trimtab_model_servers.errors import RefusalError
from trimtab_protocol import InferRequest
from trimtab_protocol.chat.embedding_refs import BLANK, PENDING, EmbeddingRef
from trimtab_protocol.chat.internal_wire import TENANTS, content_id, group_embedding_urls, parse_tenants
from trimtab_protocol.tensors import Array

PARSER_THREADS: Final = 2
"""So that one long prompt does not delay all others."""
FetchEmbeddings = Callable[[str, Sequence[EmbeddingRequest]], Awaitable[Sequence[Tensor]]]
"""Fetches embeddings from the replica that stores them."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageInput:
    """One image of a chat."""

    content: str
    """Identity: images with equal content have equal embeddings."""
    rows: int
    """Rows of its embeddings."""
    embeddings: Tensor | None = None
    """[rows, width]; None if a loader of the chat provides them."""
    padding: int = 0
    """Trailing rows that belong to empty tiles."""
    columns: int = 0
    """Columns of its tile grid; 0 if the model does not mark tiles."""
    file: ImageFile | None = None
    """Its file, if this replica encodes it."""


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingLoader:
    """Fetches or computes the embeddings of some images of a chat, given by their numbers."""

    numbers: tuple[int, ...]
    load: Callable[[], Awaitable[Sequence[Tensor]]]


Images = tuple[tuple[ImageInput, ...], tuple[EmbeddingLoader, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class ChatRow:
    """A chat: one row of a request."""

    options: Options
    tenant: str
    """Caches are shared only within a tenant."""
    prompt: Prompt
    images: tuple[ImageInput, ...] = ()
    loaders: tuple[EmbeddingLoader, ...] = ()


@dataclass(frozen=True, slots=True)
class ImageSources:
    """Sources of embeddings: a colocated encoder, or other replicas."""

    encoder: EncoderScheduler | None
    fetch: FetchEmbeddings
    width: int
    pending: PendingImages


def read_tenants(request: InferRequest, rows: int) -> list[str]:
    """Tenants of a request's rows; an unknown one gets a name of its own, so that it shares nothing."""
    return [tenant or uuid4().hex for tenant in parse_tenants(request.parameters.get(TENANTS), rows)]


class RequestParser:
    """Parses the requests of one model.

    The tokenizer and the hashes of files let other threads run; on the event loop, they would stop all streams.
    """

    def __init__(self, sources: ImageSources, tokenizer: ChatTokenizer, slot_tokens: int) -> None:
        self._sources = sources
        self._tokenizer = tokenizer
        self._slot_tokens = slot_tokens
        longest_token = max(
            (len(token.encode()) for token in tokenizer.tokenizer.get_vocab(with_added_tokens=False)), default=1
        )
        self._max_text_bytes = slot_tokens * longest_token
        self._threads = ThreadPoolExecutor(PARSER_THREADS, thread_name_prefix="parsing")

    async def parse(self, request: InferRequest) -> list[ChatRow]:
        """Parse every row of a request whose tensors were validated; RefusalError 400, 413 or 422, ProtocolError."""
        chats = await asyncio.get_running_loop().run_in_executor(self._threads, self._parse, request)
        encoder = self._sources.encoder
        return chats if encoder is None else [_with_encoder(chat, encoder) for chat in chats]

    def _parse(self, request: InferRequest) -> list[ChatRow]:
        arrays = {tensor.name: tensor.array for tensor in request.inputs}
        tenants = read_tenants(request, len(arrays["messages"]))
        return [self._parse_chat(arrays, row, tenant, request.id) for row, tenant in enumerate(tenants)]

    def _parse_chat(self, arrays: dict[str, Array], row: int, tenant: str, request_id: str) -> ChatRow:
        conversation, sources = messages.read_messages(bytes(arrays["messages"][row])), self._sources
        self._require_fit(conversation)
        options = messages.read_options(_optional_bytes(arrays, "options", row))
        references = messages.read_references(_optional_bytes(arrays, "references", row))
        if any(ref.url == PENDING for ref in references) and (len(arrays["messages"]) > 1 or not request_id):
            raise RefusalError(400, "`references` with a pending image requires a single-row request with an id")
        if references:
            images, loaders = _referenced_images(references, sources, request_id)
        else:
            images, loaders = _attached_images(arrays, row, sources.encoder), ()
        messages.require_images(conversation, len(images))
        return ChatRow(options, tenant, self._build_prompt(conversation, images), images, loaders)

    def _require_fit(self, conversation: Sequence[Message]) -> None:
        """Raise RefusalError 400 for a chat that no slot can hold, before time is spent on its text."""
        size = sum(len(message.text.encode()) for message in conversation)
        if size > self._max_text_bytes or len(conversation) > self._slot_tokens:
            raise RefusalError(
                400,
                f"messages: {size} bytes of text in {len(conversation)} messages are more than the model's "
                f"{self._slot_tokens} tokens can hold; send at most {self._max_text_bytes} bytes",
            )

    def _build_prompt(self, conversation: Sequence[Message], images: Sequence[ImageInput]) -> Prompt:
        shapes = [EmbeddingShape(image.rows, image.padding, image.columns) for image in images]
        try:
            return self._tokenizer.build_prompt(conversation, shapes)
        except Exception:
            raise
        except BaseException as error:  # a panic of the tokenizer, which would end the connection
            raise RefusalError(500, f"the tokenizer failed: {type(error).__name__}: {error}") from error


def image_files(array: Array) -> tuple[bytes, ...]:
    return tuple(bytes(file) for file in array.reshape(-1).tolist())


def _optional_bytes(arrays: dict[str, Array], name: str, row: int) -> bytes | None:
    return bytes(arrays[name][row]) if name in arrays else None


def _attached_images(arrays: dict[str, Array], row: int, encoder: EncoderScheduler | None) -> tuple[ImageInput, ...]:
    if "embeddings" in arrays:
        return _attached_embeddings(arrays, row)
    if "images" in arrays and encoder is not None:
        files = [read_image(number, file) for number, file in enumerate(image_files(arrays["images"][row]))]
        return tuple(_encoded_image(file, len(files), encoder) for file in files)
    return ()


def _referenced_images(references: Sequence[EmbeddingRef], sources: ImageSources, request_id: str) -> Images:
    """Images encoded by other replicas, or still being encoded; those of one batch are fetched together."""
    images = tuple(_referenced_image(reference, sources.width) for reference in references)
    missing = [EmbeddingRequest(number, image.rows) for number, image in enumerate(images) if image.embeddings is None]
    stored = [request for request in missing if references[request.number].url != PENDING]
    urls = group_embedding_urls([references[request.number].url for request in stored])
    batches = ((url, [stored[index] for index in indices]) for url, indices in urls.items())
    pending = [request.number for request in missing if request not in stored]
    return images, (
        *(
            EmbeddingLoader(tuple(request.number for request in batch), partial(sources.fetch, url, batch))
            for url, batch in batches
        ),
        *(
            EmbeddingLoader((number,), partial(_load_pending, sources, request_id, number, references[number]))
            for number in pending
        ),
    )


def _referenced_image(reference: EmbeddingRef, width: int) -> ImageInput:
    blank = torch.zeros(reference.rows, width) if reference.url == BLANK else None
    return ImageInput(reference.digest or uuid4().hex, reference.rows, blank, columns=reference.columns)


async def _load_pending(
    sources: ImageSources, request_id: str, number: int, announced: EmbeddingRef
) -> Sequence[Tensor]:
    """Wait for an image and fetch it; the prompt was built from the announced shape, so it must match."""
    url = await sources.pending.wait_for_url(request_id, number, announced)
    return await sources.fetch(url, [EmbeddingRequest(number, announced.rows)])


def _encoded_image(file: ImageFile, images: int, scheduler: EncoderScheduler) -> ImageInput:
    shape = scheduler.embedding_shape(file, images)
    content = content_id(scheduler.encoder.name, file.digest, shape.total)
    return ImageInput(content, shape.total, None, shape.padding, shape.columns, file)


def _with_encoder(chat: ChatRow, encoder: EncoderScheduler) -> ChatRow:
    """The chat with cached embeddings of its files, and loaders that encode the others; for the event loop."""
    tenant, files = chat.tenant, [image.file for image in chat.images if image.file is not None]
    if not files:
        return chat
    cached = [encoder.cached(file.digest, tenant, alone=len(files) == 1) for file in files]

    async def encode(number: int) -> tuple[Tensor]:
        return ((await encoder.encode(files[number], tenant, len(files), number)).rows,)

    images = tuple(
        image if embedding is None else replace(image, embeddings=embedding.rows)
        for image, embedding in zip(chat.images, cached, strict=True)
    )
    missing = (number for number, embedding in enumerate(cached) if embedding is None)
    return replace(
        chat, images=images, loaders=tuple(EmbeddingLoader((number,), partial(encode, number)) for number in missing)
    )


def _attached_embeddings(arrays: dict[str, Array], row: int) -> tuple[ImageInput, ...]:
    """Embeddings in the request itself, concatenated over the images."""
    embeddings = np.array(arrays["embeddings"][row], dtype=np.float32)
    rows = [int(count) for count in arrays["image_rows"][row]] if "image_rows" in arrays else [len(embeddings)]
    if min(rows, default=1) < 1 or sum(rows) != len(embeddings):
        raise RefusalError(
            400, f"image_rows {rows} should be above 0 and add up to {len(embeddings)}, the rows of embeddings"
        )
    columns = [int(count) for count in arrays["image_columns"][row]] if "image_columns" in arrays else [0] * len(rows)
    if len(columns) != len(rows) or min(columns, default=0) < 0:
        raise RefusalError(400, f"image_columns {columns} should be 0 or more for each of {len(rows)} images")
    digests = (
        [bytes(digest).decode(errors="replace") for digest in arrays["image_digests"][row]]
        if "image_digests" in arrays
        else []
    )
    if digests and len(digests) != len(rows):
        raise RefusalError(400, f"{len(digests)} image_digests for {len(rows)} images; send one each, or none")
    starts = np.cumsum([0, *rows]).tolist()
    return tuple(
        ImageInput(
            digests[number] if digests else uuid4().hex,
            count,
            torch.from_numpy(embeddings[starts[number] : starts[number + 1]]),
            columns=columns[number],
        )
        for number, count in enumerate(rows)
    )
