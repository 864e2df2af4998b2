"""An inference request's tensors as chats, one a row."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from trimtab_model_servers.chat import image_decoder, messages
from trimtab_model_servers.chat.embedding_client import EmbeddingRequest
from trimtab_model_servers.chat.encoder_scheduler import EncoderScheduler
from trimtab_model_servers.chat.messages import Message, Options
from trimtab_model_servers.chat.pending_images import PendingImages
from trimtab_model_servers.errors import RefusalError
from trimtab_protocol import InferRequest
from trimtab_protocol.chat.embedding_refs import AWAITED, BLANK, EmbeddingRef
from trimtab_protocol.chat.internal_wire import content_of, one_address
from trimtab_protocol.tensors import Array

Pull = Callable[[str, Sequence[EmbeddingRequest]], Awaitable[Sequence[Tensor]]]
"""Fetches images that were encoded elsewhere from an address."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageInput:
    """One image of a chat: what it shows, and how many rows it has.

    Attributes:
        content: equal where embeddings are equal.
        rows: of its embeddings.
        held: them, [rows, width], where they are at hand; else the chat has a way to come by them.
        padding: how many of the rows, the last ones, are of tiles that show nothing.
        columns: of tiles that it is cut into; 0 where none is told.
    """

    content: str
    rows: int
    held: Tensor | None = None
    padding: int = 0
    columns: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """A way to come by images of a chat: which they are, and what fetches or makes them once it is called."""

    numbers: tuple[int, ...]
    bring: Callable[[], Awaitable[Sequence[Tensor]]]


@dataclass(frozen=True, slots=True, eq=False)
class ChatRow:
    """One row."""

    messages: tuple[Message, ...]
    options: Options
    images: tuple[ImageInput, ...]
    fetches: tuple[Fetch, ...] = ()


@dataclass(frozen=True, slots=True)
class Sources:
    """Where images may come from: an encoder beside the model, or others to pull from; numbers a row of embeddings.

    What is still encoded is ``coming``.
    """

    encoding: EncoderScheduler | None
    pull: Pull
    width: int
    coming: PendingImages


def chats_of(request: InferRequest, sources: Sources) -> list[ChatRow]:
    """Read every row of a request whose tensors were checked against their stage.

    Raises:
        RefusalError: 400, 413 or 422, naming what is wrong.
    """
    given = {tensor.name: tensor.array for tensor in request.inputs}
    return [_chat(given, row, sources, request.id) for row in range(len(given["messages"]))]


def files_of(given: Array) -> tuple[bytes, ...]:
    """The image files of one row of a BYTES tensor."""
    return tuple(bytes(file) for file in given.reshape(-1).tolist())


def _chat(given: dict[str, Array], row: int, sources: Sources, request_id: str) -> ChatRow:
    conversation = messages.read_messages(given["messages"][row])
    options = messages.read_options(_one(given, "options", row))
    references = messages.read_references(_one(given, "references", row))
    if any(one.url == AWAITED for one in references) and (len(given["messages"]) > 1 or not request_id):
        raise RefusalError(400, "references: one is awaited; should be of a request of one row that has an id")
    if references:
        shown, fetches = _referred(references, sources, request_id)
    else:
        shown, fetches = _shown(given, row, options.tenant, sources)
    messages.require_images(conversation, len(shown))
    return ChatRow(conversation, options, shown, fetches)


def _one(given: dict[str, Array], name: str, row: int) -> bytes | None:
    return bytes(given[name][row]) if name in given else None


def _shown(
    given: dict[str, Array], row: int, tenant: str, sources: Sources
) -> tuple[tuple[ImageInput, ...], tuple[Fetch, ...]]:
    if "embeddings" in given:
        return _inline(given, row), ()
    if "images" in given and sources.encoding is not None:
        return _encoded_here(files_of(given["images"][row]), tenant, sources.encoding)
    return (), ()


def _referred(
    references: Sequence[EmbeddingRef], sources: Sources, request_id: str
) -> tuple[tuple[ImageInput, ...], tuple[Fetch, ...]]:
    """Images encoded elsewhere, or still being so; what one batch left at one replica comes in one answer."""
    shown = tuple(_referred_to(one, sources.width) for one in references)
    missing = [EmbeddingRequest(number, one.rows) for number, one in enumerate(shown) if one.held is None]
    there = [one for one in missing if references[one.number].url != AWAITED]
    places = one_address([references[one.number].url for one in there])
    pulls = ((url, [there[place] for place in each]) for url, each in places.items())
    awaited = [one.number for one in missing if one not in there]
    return shown, (
        *(Fetch(tuple(one.number for one in each), partial(sources.pull, url, each)) for url, each in pulls),
        *(Fetch((number,), partial(_awaited, sources, request_id, number, references[number])) for number in awaited),
    )


def _referred_to(one: EmbeddingRef, width: int) -> ImageInput:
    nothing = torch.zeros(one.rows, width) if one.url == BLANK else None
    return ImageInput(one.digest or uuid4().hex, one.rows, nothing, columns=one.columns)


async def _awaited(sources: Sources, request_id: str, number: int, announced: EmbeddingRef) -> Sequence[Tensor]:
    """Wait until an image is told, and pull it: it must be what was announced, by which the prompt was spelled."""
    url = await sources.coming.wait(request_id, number, announced)
    return await sources.pull(url, [EmbeddingRequest(number, announced.rows)])


def _encoded_here(
    files: Sequence[bytes], tenant: str, encoding: EncoderScheduler
) -> tuple[tuple[ImageInput, ...], tuple[Fetch, ...]]:
    """Images that are encoded here, or were: one that is at hand costs its chat no step of its own."""
    headers = [image_decoder.header_of(number, file) for number, file in enumerate(files)]
    shown = tuple(_shown_here(header, tenant, len(files), encoding) for header in headers)

    async def encoded(number: int) -> tuple[Tensor]:
        try:
            return ((await encoding.encode(files[number], headers[number], tenant, len(files))).rows,)
        except image_decoder.BadImage as bad:
            raise bad.of_chat(number) from bad

    missing = (number for number, one in enumerate(shown) if one.held is None)
    return shown, tuple(Fetch((number,), partial(encoded, number)) for number in missing)


def _shown_here(header: image_decoder.Header, tenant: str, count: int, encoding: EncoderScheduler) -> ImageInput:
    seeing = encoding.seeing
    rows = seeing.rows(seeing.rule.count(header.width_px, header.height_px, images=count))
    held = encoding.at_hand(header, tenant, count)
    content = content_of(seeing.name, header.digest, rows.total)
    return ImageInput(content, rows.total, held, rows.padding, rows.columns)


def _inline(given: dict[str, Array], row: int) -> tuple[ImageInput, ...]:
    """Embeddings that came with the request, one image after the other."""
    embeddings = np.array(given["embeddings"][row], dtype=np.float32)
    rows = [int(count) for count in given["image_rows"][row]] if "image_rows" in given else [len(embeddings)]
    if min(rows, default=1) < 1 or sum(rows) != len(embeddings):
        raise RefusalError(
            400, f"image_rows {rows} should be above 0 and add up to {len(embeddings)}, as embeddings has"
        )
    columns = [int(count) for count in given["image_columns"][row]] if "image_columns" in given else [0] * len(rows)
    if len(columns) != len(rows) or min(columns, default=0) < 0:
        raise RefusalError(400, f"image_columns {columns} should be 0 or more for each of {len(rows)} images")
    digests = (
        [bytes(one).decode(errors="replace") for one in given["image_digests"][row]] if "image_digests" in given else []
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
