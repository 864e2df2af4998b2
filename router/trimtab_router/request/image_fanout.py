"""Images of chats as rows of a stage that encodes, and what became of them as what a stage that writes reads. Pure."""

import json
from collections.abc import Hashable, Mapping, Sequence
from hashlib import sha256
from typing import cast

import numpy as np

from trimtab_pipelines.stages import CHAT_IMAGE_INDEX, EMBEDDINGS_INPUT, IMAGES_INPUT
from trimtab_protocol.chat.embedding_refs import (
    EmbeddingRef,
    EncodedImage,
    Identity,
    ShareRequest,
    list_of,
    read_made,
    read_referred,
)
from trimtab_protocol.chat.internal_wire import OPTIONS, texts
from trimtab_protocol.tensors import Array


def fan_out_images(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """A row for each image of each chat, and what else its chat has beside it.

    Args:
        inputs: ``images`` [chats, images], and others of a row a chat.

    Returns:
        ``images`` [rows, 1], the others' rows repeated, and [rows, 2]: how many images the chat of each has, and which
        of them it is.
    """
    shown = inputs[IMAGES_INPUT]
    each = shown.shape[1] if shown.ndim > 1 else 1
    rows = {name: np.repeat(array, each, axis=0) for name, array in inputs.items() if name != IMAGES_INPUT}
    which = np.tile(np.arange(each, dtype=np.int64), shown.shape[0])
    return {
        IMAGES_INPUT: shown.reshape(-1, 1),
        **rows,
        CHAT_IMAGE_INDEX: np.stack([np.full_like(which, each), which], axis=1),
    }


def identities(rows: Mapping[str, Array]) -> Sequence[Hashable]:
    """What each row of a stage that encodes shows, and whose it is: equal where one encoding does for both.

    Args:
        rows: as `spread` gives them.

    Returns:
        Of each row its tenant, whether it is alone in its chat, and its file; none where somebody's tenant is unknown.
    """
    files, options = rows[IMAGES_INPUT].reshape(-1), rows.get(OPTIONS)
    if files.dtype != np.object_:
        return ()
    told = [b""] * len(files) if options is None else [bytes(each) for each in options]
    try:
        tenants = {each: str(json.loads(each).get("tenant", "")) if each else "" for each in set(told)}
    except (ValueError, AttributeError, RecursionError):
        return ()
    alone = rows[CHAT_IMAGE_INDEX][:, 0] == 1
    return [(tenants[each], bool(one), bytes(file)) for each, one, file in zip(told, alone, files, strict=True)]


def join_embeddings(outputs: Mapping[str, Array], chats: int) -> dict[str, Array]:
    """What became of the images, as a list a chat.

    Args:
        outputs: ``references`` [rows], a JSON object an image.
        chats: how many there are; each has as many images as every other.
    """
    told = outputs[EMBEDDINGS_INPUT]
    each = len(told) // chats
    lists = np.empty(chats, dtype=object)
    for chat in range(chats):
        lists[chat] = list_of(map(bytes, told[chat * each : (chat + 1) * each]))
    return {EMBEDDINGS_INPUT: lists}


def image_lookup(identity: Hashable) -> bytes:
    """An image that `identities` tells, as the replica that encoded it is asked for it."""
    tenant, alone, file = cast("tuple[str, bool, bytes]", identity)
    return ShareRequest(of=Identity(file=sha256(file).hexdigest(), tenant=tenant, alone=alone)).json_bytes()


def reference(url: str, made: EncodedImage) -> Array:
    """What a replica told of one image that it keeps, with where it is pulled from."""
    return texts([_referred(url, made)])


def addressed_references(told: Array, urls: Sequence[str]) -> Array:
    """What a replica told of images that it keeps, with where each is pulled from.

    Raises:
        ProtocolError: it told something else.
    """
    return texts([_referred(url, read_made(bytes(one))) for one, url in zip(told, urls, strict=True)])


def _referred(url: str, made: EncodedImage) -> bytes:
    return EmbeddingRef(url=url, rows=made.rows, columns=made.columns, digest=made.digest).json_bytes()


def addresses(referred: Array) -> list[str]:
    """Where images are pulled from, of which each entry has one or a list."""
    return [one.url for each in referred for one in read_referred(bytes(each))]
