"""The images of a chat as they are encoded, one after the other: what whoever writes can be told of all of them. Pure.

A prompt is spelled by how many rows each image has, and prefixes are told apart by what images show. Both are known of
an image that is still encoded: how many rows follow from its size alone, so that one image of a size tells it of all;
what it shows is told by its file.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256

from trimtab_protocol.chat.embedding_refs import (
    AWAITED,
    ArrivedImage,
    EmbeddingRef,
    EncodedImage,
    list_of,
    read_made,
    read_referred,
    told_arrived,
)
from trimtab_protocol.chat.errors import InvalidChat
from trimtab_protocol.chat.image_header import read_header
from trimtab_protocol.chat.internal_wire import content_of, encoder_of, texts
from trimtab_protocol.tensors import Array

MOST_SIZES = 4096
_Size = tuple[str, int, int]


class ImageSizeCache:
    """What is made of images that are not alone in their chat, by what encodes them, width and height in px."""

    def __init__(self, most: int = MOST_SIZES) -> None:
        self._most = most
        self._made: OrderedDict[_Size, EncodedImage] = OrderedDict()

    def __len__(self) -> int:
        return len(self._made)

    def note(self, encoder: str, file: bytes, made: EncodedImage) -> None:
        """An image was encoded; the size that was seen longest ago is forgotten."""
        size = _size(file)
        if size is not None:
            self._made[encoder, *size] = made
            self._made.move_to_end((encoder, *size))
            if len(self._made) > self._most:
                self._made.popitem(last=False)

    def made(self, encoder: str, file: bytes) -> EncodedImage | None:
        """What was made of the last image of the same size; None where none of its size was seen yet."""
        size = _size(file)
        return None if size is None else self._made.get((encoder, *size))


class PartialImages:
    """The images of one chat.

    Args:
        files: of all its images, in order.
        sizes: what is known of images by their size, and learnt from these.
    """

    def __init__(self, files: Sequence[bytes], sizes: ImageSizeCache) -> None:
        self._files = files
        self._sizes = sizes
        self._told: dict[int, bytes] = {}
        self._announced: list[bytes] | None = None

    @property
    def begun(self) -> bool:
        """Whether its first image is there, which is what a prompt can begin with."""
        return 0 in self._told

    @property
    def whole(self) -> bool:
        """Whether all are there."""
        return len(self._told) == len(self._files)

    def came(self, start: int, references: Array) -> dict[int, bytes]:
        """Images from number `start` on are encoded; returns those that were not known to be, by number."""
        came = {start + place: bytes(told) for place, told in enumerate(references)}
        new = {number: told for number, told in came.items() if number not in self._told}
        for number, told in new.items():
            self._told[number] = told
            made = read_made(told)
            self._sizes.note(encoder_of(made.digest), self._files[number], made)
        return new

    def references(self) -> Array | None:
        """What can be told of all of them, as a list a row; None where one of them cannot be announced."""
        if self._announced is None:
            self._announced = self._announcements()
        if self._announced is None:
            return None
        all_of_them = (self._told.get(number, told) for number, told in enumerate(self._announced))
        return texts([list_of(all_of_them)])

    def _announcements(self) -> list[bytes] | None:
        encoder = encoder_of(read_made(self._told[0]).digest)
        known = [self._sizes.made(encoder, file) for file in self._files] if encoder else [None]
        alike = [made for made in known if made is not None]
        if len(alike) != len(known):
            return None
        return [
            b"" if number in self._told else _announcement(encoder, file, made)
            for number, (file, made) in enumerate(zip(self._files, alike, strict=True))
        ]


def numbered(images: Mapping[int, bytes]) -> bytes:
    """Images that were awaited, as a replica is told of them."""
    referred = ((number, one) for number, told in images.items() for one in read_referred(told))
    return told_arrived(
        ArrivedImage(image=number, url=one.url, rows=one.rows, columns=one.columns, digest=one.digest)
        for number, one in referred
    )


def _announcement(encoder: str, file: bytes, made: EncodedImage) -> bytes:
    digest = content_of(encoder, sha256(file).hexdigest(), made.rows)
    return EmbeddingRef(url=AWAITED, rows=made.rows, columns=made.columns, digest=digest).json_bytes()


def _size(file: bytes) -> tuple[int, int] | None:
    try:
        header = read_header(file, "")
    except InvalidChat:
        return None
    return header.width_px, header.height_px
