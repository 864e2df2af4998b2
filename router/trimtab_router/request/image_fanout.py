"""Fan-out of a chat's images to rows of an encoder stage, and fan-in of their embeddings."""

import json
from collections.abc import Hashable, Mapping, Sequence
from hashlib import sha256
from typing import cast

import numpy as np

from trimtab_pipelines.stages import CHAT_IMAGE_INDEX, EMBEDDINGS_INPUT, IMAGES_INPUT
from trimtab_protocol.chat.embedding_refs import (
    EmbeddingRef,
    EncodedImage,
    ImageIdentity,
    ShareRequest,
    join_refs,
    parse_encoded_image,
    parse_refs,
)
from trimtab_protocol.chat.internal_wire import OPTIONS, bytes_tensor
from trimtab_protocol.tensors import Array


def fan_out_images(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """One row per image of each chat, with the other inputs of its chat.

    Args:
        inputs: ``images`` [chats, images], and others with one row per chat.

    Returns:
        ``images`` [rows, 1], the others' rows repeated, and [rows, 2]: number of images in the chat, and index of the
            image.
    """
    images = inputs[IMAGES_INPUT]
    each = images.shape[1] if images.ndim > 1 else 1
    rows = {name: np.repeat(array, each, axis=0) for name, array in inputs.items() if name != IMAGES_INPUT}
    image_index = np.tile(np.arange(each, dtype=np.int64), images.shape[0])
    return {
        IMAGES_INPUT: images.reshape(-1, 1),
        **rows,
        CHAT_IMAGE_INDEX: np.stack([np.full_like(image_index, each), image_index], axis=1),
    }


def image_identities(rows: Mapping[str, Array]) -> Sequence[Hashable]:
    """Identity of each image row: equal if one encoding serves both.

    Args:
        rows: result of `fan_out_images`.

    Returns:
        For each row its tenant, whether it is the only image of its chat, and its file. Empty if a tenant is unknown.
    """
    files, options = rows[IMAGES_INPUT].reshape(-1), rows.get(OPTIONS)
    if files.dtype != np.object_:
        return ()
    rows_of_references = [b""] * len(files) if options is None else [bytes(each) for each in options]
    try:
        tenants = {each: str(json.loads(each).get("tenant", "")) if each else "" for each in set(rows_of_references)}
    except (ValueError, AttributeError, RecursionError):
        return ()
    only_image = rows[CHAT_IMAGE_INDEX][:, 0] == 1
    return [
        (tenants[each], bool(reference), bytes(file))
        for each, reference, file in zip(rows_of_references, only_image, files, strict=True)
    ]


def join_embeddings(outputs: Mapping[str, Array], chats: int) -> dict[str, Array]:
    """Embedding references as one list per chat.

    Args:
        outputs: ``references`` [rows], one JSON object per image.
        chats: number of chats. All have the same number of images.
    """
    rows_of_references = outputs[EMBEDDINGS_INPUT]
    each = len(rows_of_references) // chats
    lists = np.empty(chats, dtype=object)
    for chat in range(chats):
        lists[chat] = join_refs(map(bytes, rows_of_references[chat * each : (chat + 1) * each]))
    return {EMBEDDINGS_INPUT: lists}


def image_lookup(identity: Hashable) -> bytes:
    """Request body that asks a replica for the cached embedding of an image identity."""
    tenant, only_image, file = cast("tuple[str, bool, bytes]", identity)
    return ShareRequest(of=ImageIdentity(file=sha256(file).hexdigest(), tenant=tenant, alone=only_image)).json_bytes()


def embedding_reference(url: str, encoded: EncodedImage) -> Array:
    """Reference to one stored embedding: what the replica reported, with the URL to fetch it from."""
    return bytes_tensor([_reference_bytes(url, encoded)])


def addressed_references(rows_of_references: Array, urls: Sequence[str]) -> Array:
    """References to stored embeddings: what the replica reported, with the URLs to fetch them from.

    Raises:
        ProtocolError: the replica reported something else.
    """
    return bytes_tensor(
        [
            _reference_bytes(url, parse_encoded_image(bytes(reference)))
            for reference, url in zip(rows_of_references, urls, strict=True)
        ]
    )


def _reference_bytes(url: str, encoded: EncodedImage) -> bytes:
    return EmbeddingRef(url=url, rows=encoded.rows, columns=encoded.columns, digest=encoded.digest).json_bytes()


def embedding_urls(references: Array) -> list[str]:
    """URLs of embedding references, each of which is an object or a list."""
    return [reference.url for each in references for reference in parse_refs(bytes(each))]
