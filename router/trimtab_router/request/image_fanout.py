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
    per_chat = images.shape[1] if images.ndim > 1 else 1
    rows = {name: np.repeat(array, per_chat, axis=0) for name, array in inputs.items() if name != IMAGES_INPUT}
    image_index = np.tile(np.arange(per_chat, dtype=np.int64), images.shape[0])
    return {
        IMAGES_INPUT: images.reshape(-1, 1),
        **rows,
        CHAT_IMAGE_INDEX: np.stack([np.full_like(image_index, per_chat), image_index], axis=1),
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
    texts = [b""] * len(files) if options is None else [bytes(text) for text in options]
    try:
        tenants = {text: str(json.loads(text).get("tenant", "")) if text else "" for text in set(texts)}
    except (ValueError, AttributeError, RecursionError):
        return ()
    alone = rows[CHAT_IMAGE_INDEX][:, 0] == 1
    return [
        (tenants[text], bool(only_image), bytes(file))
        for text, only_image, file in zip(texts, alone, files, strict=True)
    ]


def join_embeddings(outputs: Mapping[str, Array], chats: int) -> dict[str, Array]:
    """Embedding references as one list per chat.

    Args:
        outputs: ``references`` [rows], one JSON object per image.
        chats: number of chats. All have the same number of images.
    """
    references = outputs[EMBEDDINGS_INPUT]
    per_chat = len(references) // chats
    lists = np.empty(chats, dtype=object)
    for chat in range(chats):
        lists[chat] = join_refs(map(bytes, references[chat * per_chat : (chat + 1) * per_chat]))
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
    return [reference.url for entry in references for reference in parse_refs(bytes(entry))]
