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


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself, and what it is."""

    width_px: int
    height_px: int
    digest: str


def header(number: int, file: bytes) -> Header:
    """Read an image's size without decoding it.

    Raises:
        RefusalError: 422 where it is no image of a known format, 413 where it has too many pixels.
    """
    with _opened(number, file) as image:
        width, height = image.size
    if width * height > MOST_PIXELS:
        raise RefusalError(
            413, f"image {number} has {width} × {height} pixels; send at most {MOST_PIXELS:,}".replace(",", " ")
        )
    return Header(width, height, hashlib.sha256(file).hexdigest())


def opened(number: int, file: bytes, mode: str) -> Pillow.Image:
    """Decode an image, its first frame, in a mode such as ``L`` or ``RGB``.

    Raises:
        RefusalError: 422 where it cannot be decoded.
    """
    with _opened(number, file) as image:
        try:
            return image.convert(mode)
        except _BROKEN as error:
            raise RefusalError(422, f"image {number} cannot be decoded: {error}") from error


def _opened(number: int, file: bytes) -> Pillow.Image:
    try:
        return Pillow.open(io.BytesIO(file), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise RefusalError(422, f"image {number} is no {', '.join(FORMATS)} file") from error
    except _BROKEN as error:
        raise RefusalError(422, f"image {number} cannot be read: {error}") from error
