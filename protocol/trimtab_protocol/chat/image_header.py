"""Image headers: format and size of an image file, without decoding it; and files without metadata.

Decoders are not used, since some allocate memory or decompress metadata when they open a file. Loops over a file are
bounded.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from struct import unpack_from
from typing import Final

from trimtab_protocol.errors import InvalidChat

MAX_PIXELS: Final = 40_000_000
"""Limit of the model servers."""
_MAX_BLOCKS = 4096
_PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR"
_PNG_PIXELS = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"})
_JPEG_DATA = 0xDA
_JPEG_METADATA = frozenset({*range(0xE1, 0xF0), 0xFE} - {0xEE})
"""JPEG markers of Exif, profiles, previews and comments; 0xEE names the colour space."""
_SIZED = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""JPEG start-of-frame markers, which have the size."""
_BARE = frozenset({0x01, *range(0xD0, 0xD9)})
"""JPEG markers without a segment."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Format and size of an image."""

    format: str
    width_px: int
    height_px: int


def read_header(file: bytes, param: str, max_pixels: int = MAX_PIXELS) -> ImageHeader:
    """Format and size of an image file, whatever its media type.

    Raises InvalidChat if the file is not a PNG, JPEG, WebP or GIF, or has too many pixels.
    """
    header = parse_header(file)
    if header is None:
        raise InvalidChat(f"{param} is not a PNG, JPEG, WebP or GIF file", param=param, code="invalid_image")
    if header.width_px * header.height_px > max_pixels:
        size = f"{header.width_px} × {header.height_px} pixels"
        raise InvalidChat(f"{param} has {size}; send at most {max_pixels}", param=param, code="image_too_large")
    return header


def parse_header(file: bytes) -> ImageHeader | None:
    """Format and size of an image file; None if it is not a PNG, JPEG, WebP or GIF."""
    try:
        header = _read(file)
    except (struct.error, IndexError):
        return None
    return header if header is not None and header.width_px and header.height_px else None


def _read(file: bytes) -> ImageHeader | None:
    if file.startswith(_PNG):
        return ImageHeader("png", *unpack_from(">II", file, 16))
    if file.startswith((b"GIF87a", b"GIF89a")):
        return _gif(file)
    if file.startswith(b"RIFF") and file[8:12] == b"WEBP":
        return _webp(file)
    if file.startswith(b"\xff\xd8"):
        return _jpeg(file)
    return None


def _gif(file: bytes) -> ImageHeader | None:
    """The screen, or its first frame if larger, since decoders allocate both."""
    width, height, packed = unpack_from("<HHB", file, 6)
    position, inside = 13 + _table_bytes(packed), False
    for _ in range(_MAX_BLOCKS):
        kind = file[position]
        if inside:  # an extension; each block begins with its length
            inside = kind != 0
            position += 1 + kind
        elif kind == 0x2C:
            left, top, own_width, own_height = unpack_from("<HHHH", file, position + 1)
            return ImageHeader("gif", max(width, left + own_width), max(height, top + own_height))
        elif kind == 0x21:
            inside = True
            position += 2
        else:
            return None
    return None


def _table_bytes(packed: int) -> int:
    return 3 << ((packed & 7) + 1) if packed & 0x80 else 0


def _webp(file: bytes) -> ImageHeader | None:
    match file[12:16]:
        case b"VP8X":
            width, height = (int.from_bytes(file[at : at + 3], "little") + 1 for at in (24, 27))
            return ImageHeader("webp", width, height) if len(file) >= 30 else None
        case b"VP8L" if file[20] == 0x2F:
            (bits,) = unpack_from("<I", file, 21)
            return ImageHeader("webp", (bits & 0x3FFF) + 1, ((bits >> 14) & 0x3FFF) + 1)
        case b"VP8 " if file[23:26] == b"\x9d\x01\x2a":
            width, height = unpack_from("<HH", file, 26)
            return ImageHeader("webp", width & 0x3FFF, height & 0x3FFF)
        case _:
            return None


def _jpeg(file: bytes) -> ImageHeader | None:
    """The largest size before the image data, since decoders differ in which of several they use."""
    width, height = 0, 0
    for marker, start, _ in _jpeg_segments(file):
        if marker == _JPEG_DATA:
            return ImageHeader("jpeg", width, height)
        if marker in _SIZED:
            own_height, own_width = unpack_from(">HH", file, start + 5)
            width, height = max(width, own_width), max(height, own_height)
    return None


def _jpeg_segments(file: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, start and end of each segment; the last one is the image data with the rest of the file."""
    position = 2
    for _ in range(_MAX_BLOCKS):
        if file[position] != 0xFF:
            return
        start, marker = position, file[position + 1]
        if marker == 0xFF:  # padding
            position += 1
        elif marker == _JPEG_DATA:
            position = len(file)
        elif marker in _BARE:
            position += 2
        else:
            position += 2 + max(unpack_from(">H", file, position + 2)[0], 2)
        yield marker, start, position
        if marker == _JPEG_DATA:
            return


def without_metadata(file: bytes) -> bytes:
    """A valid PNG or JPEG file without texts, profiles and previews; a file of another format unchanged.

    Decoders would decompress them, or copy them again for each of them, before they decode a pixel.
    """
    if file.startswith(_PNG):
        return _png_pixels(file)
    if not file.startswith(b"\xff\xd8"):
        return file
    kept = (file[start:end] for marker, start, end in _jpeg_segments(file) if marker not in _JPEG_METADATA)
    return b"".join((file[:2], *kept))


def _png_pixels(file: bytes) -> bytes:
    pixels, position = bytearray(file[:8]), 8
    while position + 8 <= len(file):
        length, kind = unpack_from(">I4s", file, position)
        end = position + 12 + length
        if kind in _PNG_PIXELS:
            pixels += file[position:end]
        position = end
    return bytes(pixels)
