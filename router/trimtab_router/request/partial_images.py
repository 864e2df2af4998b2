"""`PartialImages`: references to all images of one chat while some of them are still being encoded.

A prompt depends on the number of embedding rows of each image, and prefix caching on the content of the images. Both
are known before an image is encoded: the number of rows follows from its size alone, as learned from another image of
that size, and the content from its file.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256

from trimtab_protocol.chat.embedding_refs import (
    PENDING,
    ArrivedImage,
    EmbeddingRef,
    EncodedImage,
    dump_arrived,
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


class ImageSizeCache:
    """Encoding results by encoder, width and height in px, of images that share a chat with others."""

    def __init__(self, max_sizes: int = MAX_SIZES) -> None:
        self._max_sizes = max_sizes
        self._results: OrderedDict[_Size, EncodedImage] = OrderedDict()

    def __len__(self) -> int:
        return len(self._results)

    def record(self, encoder: str, file: bytes, result: EncodedImage) -> None:
        """Record an encoded image. The least recently used size is discarded."""
        size = _size(file)
        if size is not None:
            self._results[encoder, *size] = result
            self._results.move_to_end((encoder, *size))
            if len(self._results) > self._max_sizes:
                self._results.popitem(last=False)

    def lookup(self, encoder: str, file: bytes) -> EncodedImage | None:
        """Result for the last image of the same size, None if there was none."""
        size = _size(file)
        return None if size is None else self._results.get((encoder, *size))


class PartialImages:
    """Images of one chat.

    Args:
        files: all images of the chat, in order.
        sizes: known results by image size, updated with this chat's.
    """

    def __init__(self, files: Sequence[bytes], sizes: ImageSizeCache) -> None:
        self._files = files
        self._sizes = sizes
        self._encoded: dict[int, bytes] = {}
        self._announced: list[bytes] | None = None

    @property
    def has_first(self) -> bool:
        """Whether the first image is encoded: prefill can start with it."""
        return 0 in self._encoded

    @property
    def complete(self) -> bool:
        """Whether all images are encoded."""
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
    """Request body that announces encoded images to a replica that waits for them."""
    arrived = ((index, ref) for index, reference in images.items() for ref in parse_refs(reference))
    return dump_arrived(
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
