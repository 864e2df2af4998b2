"""Images of chats: rows of an encoder stage, references to their embeddings, and chats that are encoded in part.

A prompt depends on the number of embedding rows of each image, and prefix caching on the content of the images. Both
are known before an image is encoded: the number of rows follows from its size alone, as learned from another image of
that size, and the content from its file.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from hashlib import sha256
from typing import cast

import numpy as np

from trimtab_pipelines.stages import CHAT_IMAGE_INDEX, EMBEDDINGS_INPUT, IMAGES_INPUT
from trimtab_protocol.chat.embedding_refs import (
    PENDING,
    ArrivedImage,
    EmbeddingRef,
    EncodedImage,
    ImageIdentity,
    ShareRequest,
    dump_refs,
    join_refs,
    parse_encoded_image,
    parse_refs,
)
from trimtab_protocol.chat.image_header import read_header
from trimtab_protocol.chat.internal_wire import bytes_tensor, content_id, encoder_of_content
from trimtab_protocol.errors import InvalidChat
from trimtab_protocol.tensors import Array

MAX_SIZES = 4096
_Size = tuple[str, int, int]


def fan_out_images(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Rows [rows, 1], one per image of each chat, with its chat's inputs, number of images, and index among them."""
    images = inputs[IMAGES_INPUT]
    per_chat = images.shape[1] if images.ndim > 1 else 1
    rows = {name: np.repeat(array, per_chat, axis=0) for name, array in inputs.items() if name != IMAGES_INPUT}
    image_index = np.tile(np.arange(per_chat, dtype=np.int64), images.shape[0])
    return {
        IMAGES_INPUT: images.reshape(-1, 1),
        **rows,
        CHAT_IMAGE_INDEX: np.stack([np.full_like(image_index, per_chat), image_index], axis=1),
    }


def image_identities(rows: Mapping[str, Array], tenant: str) -> Sequence[Hashable]:
    """Tenant, whether the image is its chat's only one, and file of each row. Empty if the tenant is unknown."""
    files = rows[IMAGES_INPUT].reshape(-1)
    if files.dtype != np.object_ or not tenant:
        return ()
    alone = rows[CHAT_IMAGE_INDEX][:, 0] == 1
    return [(tenant, bool(only_image), bytes(file)) for only_image, file in zip(alone, files, strict=True)]


def join_embeddings(outputs: Mapping[str, Array], chats: int) -> dict[str, Array]:
    """Embedding references [rows] as one list per chat. All chats have the same number of images."""
    references = outputs[EMBEDDINGS_INPUT]
    per_chat = len(references) // chats
    lists = np.empty(chats, dtype=object)
    for chat in range(chats):
        lists[chat] = join_refs(map(bytes, references[chat * per_chat : (chat + 1) * per_chat]))
    return {EMBEDDINGS_INPUT: lists}


def image_lookup(identity: Hashable) -> bytes:
    tenant, only_image, file = cast("tuple[str, bool, bytes]", identity)
    return ShareRequest(of=ImageIdentity(file=sha256(file).hexdigest(), tenant=tenant, alone=only_image)).json_bytes()


def embedding_reference(url: str, encoded: EncodedImage) -> Array:
    return bytes_tensor([_reference_bytes(url, encoded)])


def addressed_references(rows_of_references: Array, urls: Sequence[str]) -> Array:
    """References to stored embeddings with the URLs to fetch them from. Raises ProtocolError if they are malformed."""
    return bytes_tensor(
        [
            _reference_bytes(url, parse_encoded_image(bytes(reference)))
            for reference, url in zip(rows_of_references, urls, strict=True)
        ]
    )


def _reference_bytes(url: str, encoded: EncodedImage) -> bytes:
    return EmbeddingRef(url=url, rows=encoded.rows, columns=encoded.columns, digest=encoded.digest).json_bytes()


def embedding_urls(references: Array) -> list[str]:
    return [reference.url for entry in references for reference in parse_refs(bytes(entry))]


class ImageSizeCache:
    """Encoding results by encoder, width and height in px, of images that share a chat with others."""

    def __init__(self, max_sizes: int = MAX_SIZES) -> None:
        self._max_sizes = max_sizes
        self._results: OrderedDict[_Size, EncodedImage] = OrderedDict()

    def __len__(self) -> int:
        return len(self._results)

    def record(self, encoder: str, file: bytes, result: EncodedImage) -> None:
        size = _size(file)
        if size is not None:
            self._results[encoder, *size] = result
            self._results.move_to_end((encoder, *size))
            if len(self._results) > self._max_sizes:
                self._results.popitem(last=False)

    def lookup(self, encoder: str, file: bytes) -> EncodedImage | None:
        size = _size(file)
        return None if size is None else self._results.get((encoder, *size))


class PartialImages:
    """All images of one chat, in order. `sizes` is updated with its results."""

    def __init__(self, files: Sequence[bytes], sizes: ImageSizeCache) -> None:
        self._files = files
        self._sizes = sizes
        self._encoded: dict[int, bytes] = {}
        self._announced: list[bytes] | None = None

    @property
    def has_first(self) -> bool:
        return 0 in self._encoded

    @property
    def complete(self) -> bool:
        return len(self._encoded) == len(self._files)

    def add(self, start: int, references: Array) -> dict[int, bytes]:
        """Add encoded images from index `start` on. Returns the new ones by index."""
        add = {start + offset: bytes(reference) for offset, reference in enumerate(references)}
        new = {index: reference for index, reference in add.items() if index not in self._encoded}
        for index, reference in new.items():
            self._encoded[index] = reference
            result = parse_encoded_image(reference)
            self._sizes.record(encoder_of_content(result.digest), self._files[index], result)
        return new

    def references(self) -> Array | None:
        """References to all images as a list per row, None if one of them cannot be announced."""
        if self._announced is None:
            self._announced = self._announcements()
        if self._announced is None:
            return None
        references = (self._encoded.get(index, reference) for index, reference in enumerate(self._announced))
        return bytes_tensor([join_refs(references)])

    def _announcements(self) -> list[bytes] | None:
        encoder = encoder_of_content(parse_encoded_image(self._encoded[0]).digest)
        results = [self._sizes.lookup(encoder, file) for file in self._files] if encoder else [None]
        complete_results = [result for result in results if result is not None]
        if len(complete_results) != len(results):
            return None
        return [
            b"" if index in self._encoded else _announcement(encoder, file, result)
            for index, (file, result) in enumerate(zip(self._files, complete_results, strict=True))
        ]


def arrived_images_body(images: Mapping[int, bytes]) -> bytes:
    arrived = ((index, ref) for index, reference in images.items() for ref in parse_refs(reference))
    return dump_refs(
        ArrivedImage(image=index, url=ref.url, rows=ref.rows, columns=ref.columns, digest=ref.digest)
        for index, ref in arrived
    )


def _announcement(encoder: str, file: bytes, result: EncodedImage) -> bytes:
    digest = content_id(encoder, sha256(file).hexdigest(), result.rows)
    return EmbeddingRef(url=PENDING, rows=result.rows, columns=result.columns, digest=digest).json_bytes()


def _size(file: bytes) -> tuple[int, int] | None:
    try:
        header = read_header(file, "")
    except InvalidChat:
        return None
    return header.width_px, header.height_px
