"""Image files: looked at by their headers first, opened only when small enough."""

import hashlib
import io
from dataclasses import dataclass
from typing import Final

from PIL import Image as Pillow
from PIL import UnidentifiedImageError

from trimtab_model_servers.errors import RefusalError

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF")
MOST_PIXELS: Final = 40_000_000
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError)
"""What Pillow's plugins raise on files that are not what they say."""

Pillow.MAX_IMAGE_PIXELS = None  # ours is tighter, and what is above it is never decoded


class BadImage(RefusalError):
    """A file is no image that is taken; who knows which one of its chat it is says so."""

    def __init__(self, status_code: int, why: str) -> None:
        super().__init__(status_code, f"an image {why}")
        self._why = why

    def of_chat(self, number: int) -> RefusalError:
        """The same, of an image by its number in its chat."""
        return RefusalError(self.status_code, f"image {number} {self._why}")


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself, and what it is."""

    width_px: int
    height_px: int
    digest: str


def header(file: bytes) -> Header:
    """Read an image's size without decoding it.

    Raises:
        BadImage: 422 where it is no image of a known format, 413 where it has too many pixels.
    """
    with _opened(file) as image:
        width, height = image.size
    if width * height > MOST_PIXELS:
        raise BadImage(413, f"has {width} × {height} pixels; send at most {MOST_PIXELS:,}".replace(",", " "))
    return Header(width, height, hashlib.sha256(file).hexdigest())


def header_of(number: int, file: bytes) -> Header:
    """As ``header``, of an image by its number in its chat."""
    try:
        return header(file)
    except BadImage as bad:
        raise bad.of_chat(number) from bad


def decode_image(file: bytes, mode: str) -> Pillow.Image:
    """Decode an image, its first frame, in a mode such as ``L`` or ``RGB``.

    Raises:
        BadImage: 422 where it cannot be decoded.
    """
    with _opened(file) as image:
        try:
            return image.convert(mode)
        except _BROKEN as error:
            raise BadImage(422, f"cannot be decoded: {error}") from error


def _opened(file: bytes) -> Pillow.Image:
    try:
        return Pillow.open(io.BytesIO(file), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise BadImage(422, f"is no {', '.join(FORMATS)} file") from error
    except _BROKEN as error:
        raise BadImage(422, f"cannot be read: {error}") from error
