"""Image files: the size is checked by the header; only then is an image decoded."""

import hashlib
import io
import struct
from dataclasses import dataclass
from typing import Final

from PIL import Image as Pillow

from trimtab_model_servers.errors import RefusalError
from trimtab_protocol.chat.image_header import MAX_PIXELS, parse_header, without_metadata

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
_DECODER_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError, struct.error)
"""Errors that Pillow's plugins raise on damaged files."""

Pillow.MAX_IMAGE_PIXELS = None  # MAX_PIXELS is tighter, and larger images are never decoded


class BadImage(RefusalError):
    """A file is not an acceptable image."""

    def __init__(self, status_code: int, problem: str) -> None:
        super().__init__(status_code, f"an image {problem}")
        self._problem = problem

    def with_number(self, number: int) -> RefusalError:
        """The same error, naming the image by its number in its chat."""
        return RefusalError(self.status_code, f"image {number} {self._problem}")


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image file whose header was checked."""

    content: bytes
    width_px: int
    height_px: int
    digest: str
    """SHA-256 of the content in hex."""


def read_image(number: int, content: bytes) -> ImageFile:
    """Check an image's header without decoding it; RefusalError 422 if it is none, 413 above MAX_PIXELS."""
    header = parse_header(content)
    if header is None:
        raise RefusalError(422, f"image {number} is no {', '.join(FORMATS)} file")
    if header.width_px * header.height_px > MAX_PIXELS:
        size = f"{header.width_px} × {header.height_px} pixels; send at most {MAX_PIXELS:,}".replace(",", " ")
        raise RefusalError(413, f"image {number} has {size}")
    return ImageFile(content, header.width_px, header.height_px, hashlib.sha256(content).hexdigest())


def decode_image(content: bytes, mode: str) -> Pillow.Image:
    """Decode the first frame in a mode such as ``L`` or ``RGB``; raises BadImage 422."""
    try:
        with Pillow.open(io.BytesIO(without_metadata(content)), formats=FORMATS) as image:
            return image.convert(mode)
    except _DECODER_ERRORS as error:
        raise BadImage(422, f"cannot be decoded: {error}") from error
