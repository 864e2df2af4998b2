"""Image files: the size is checked by the header; only then is an image decoded."""

import hashlib
import io
from dataclasses import dataclass
from typing import Final

from PIL import Image as Pillow
from PIL import UnidentifiedImageError

from trimtab_model_servers.errors import RefusalError

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS: Final = 40_000_000
_DECODER_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError)
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
class Header:
    """Size of an image, and the SHA-256 of its file in hex."""

    width_px: int
    height_px: int
    digest: str


def read_image_header(number: int, file: bytes) -> Header:
    """Read the header of a chat's image by its number, without decoding it.

    Raises:
        RefusalError: 422, not an image of a known format; 413, too many pixels.
    """
    try:
        return _read_header(file)
    except BadImage as bad:
        raise bad.with_number(number) from bad


def _read_header(file: bytes) -> Header:
    with _open(file) as image:
        width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadImage(413, f"has {width} × {height} pixels; send at most {MAX_PIXELS:,}".replace(",", " "))
    return Header(width, height, hashlib.sha256(file).hexdigest())


def decode_image(file: bytes, mode: str) -> Pillow.Image:
    """Decode the first frame of an image in a mode such as ``L`` or ``RGB``.

    Raises:
        BadImage: 422, it cannot be decoded.
    """
    with _open(file) as image:
        try:
            return image.convert(mode)
        except _DECODER_ERRORS as error:
            raise BadImage(422, f"cannot be decoded: {error}") from error


def _open(file: bytes) -> Pillow.Image:
    try:
        return Pillow.open(io.BytesIO(file), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise BadImage(422, f"is no {', '.join(FORMATS)} file") from error
    except _DECODER_ERRORS as error:
        raise BadImage(422, f"cannot be read: {error}") from error
