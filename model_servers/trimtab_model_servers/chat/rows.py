"""An inference request's tensors as chats, one a row."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from trimtab_model_servers.chat import images, words
from trimtab_model_servers.chat.encoding import Encoding
from trimtab_model_servers.chat.words import BLANK, Message, Options, Reference
from trimtab_model_servers.errors import RefusalError
from trimtab_protocol import InferRequest
from trimtab_protocol.tensors import Array

Pull = Callable[[Reference, int], Awaitable[Tensor]]
"""Fetches an image encoded elsewhere, and is told its number."""


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """One image of a chat: what it shows, how many rows it has, and how to come by them.

    Attributes:
        content: equal where embeddings are equal.
        rows: of its embeddings.
        source: them, [rows, width], where they are at hand, or what fetches or makes them once it is called.
        padding: how many of the rows, the last ones, are of tiles that show nothing.
    """

    content: str
    rows: int
    source: Tensor | Callable[[], Awaitable[Tensor]]
    padding: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Chat:
    """One row."""

    messages: tuple[Message, ...]
    options: Options
    images: tuple[Shown, ...]


@dataclass(frozen=True, slots=True)
class Sources:
    """Where images may come from: an encoder beside the model, or others to pull from; numbers a row of embeddings."""

    encoding: Encoding | None
    pull: Pull
    width: int


def chats_of(request: InferRequest, sources: Sources) -> list[Chat]:
    """Read every row of a request whose tensors were checked against their stage.

    Raises:
        RefusalError: 400, 413 or 422, naming what is wrong.
    """
    given = {tensor.name: tensor.array for tensor in request.inputs}
    return [_chat(given, row, sources) for row in range(len(given["messages"]))]


def files_of(given: Array) -> tuple[bytes, ...]:
    """The image files of one row of a BYTES tensor."""
    return tuple(bytes(file) for file in given.reshape(-1).tolist())


def _chat(given: dict[str, Array], row: int, sources: Sources) -> Chat:
    messages = words.read_messages(given["messages"][row])
    options = words.read_options(_one(given, "options", row))
    shown = _shown(given, row, options.tenant, sources)
    words.require_images(messages, len(shown))
    return Chat(messages, options, shown)


def _one(given: dict[str, Array], name: str, row: int) -> bytes | None:
    return bytes(given[name][row]) if name in given else None


def _shown(given: dict[str, Array], row: int, tenant: str, sources: Sources) -> tuple[Shown, ...]:
    references = words.read_references(_one(given, "references", row))
    if references:
        return tuple(_referred(one, number, sources) for number, one in enumerate(references))
    if "embeddings" in given:
        return _inline(given, row)
    if "images" in given and sources.encoding is not None:
        return _encoded_here(files_of(given["images"][row]), tenant, sources.encoding)
    return ()


def _referred(one: Reference, number: int, sources: Sources) -> Shown:
    source = torch.zeros(one.rows, sources.width) if one.url == BLANK else partial(sources.pull, one, number)
    return Shown(one.digest or uuid4().hex, one.rows, source)


def _encoded_here(files: Sequence[bytes], tenant: str, encoding: Encoding) -> tuple[Shown, ...]:
    headers = [images.header(number, file) for number, file in enumerate(files)]
    return tuple(
        _shown_here(file, header, tenant, len(files), encoding) for file, header in zip(files, headers, strict=True)
    )


def _shown_here(file: bytes, header: images.Header, tenant: str, count: int, encoding: Encoding) -> Shown:
    """An image that is encoded here, or was: one that is at hand costs its chat no step of its own."""
    seeing = encoding.seeing
    rows = seeing.rows(seeing.rule.count(header.width_px, header.height_px, images=count))
    held = encoding.at_hand(header, tenant, count)
    source = partial(encoding.encode, file, header, tenant, count) if held is None else held
    return Shown(f"{seeing.name}:{header.digest}:{rows.total}", rows.total, source, rows.padding)


def _inline(given: dict[str, Array], row: int) -> tuple[Shown, ...]:
    """Embeddings that came with the request, one image after the other."""
    embeddings = np.array(given["embeddings"][row], dtype=np.float32)
    rows = [int(count) for count in given["image_rows"][row]] if "image_rows" in given else [len(embeddings)]
    if min(rows, default=1) < 1 or sum(rows) != len(embeddings):
        raise RefusalError(
            400, f"image_rows {rows} should be above 0 and add up to {len(embeddings)}, as embeddings has"
        )
    digests = (
        [bytes(one).decode(errors="replace") for one in given["image_digests"][row]] if "image_digests" in given else []
    )
    if digests and len(digests) != len(rows):
        raise RefusalError(400, f"{len(digests)} image_digests for {len(rows)} images; send one each, or none")
    starts = np.cumsum([0, *rows]).tolist()
    return tuple(
        Shown(
            digests[number] if digests else uuid4().hex,
            count,
            torch.from_numpy(embeddings[starts[number] : starts[number + 1]]),
        )
        for number, count in enumerate(rows)
    )
