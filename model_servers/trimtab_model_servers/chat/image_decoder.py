"""Image files: the size is checked by the header; only then is an image decoded, within a budget of memory."""

import contextlib
import hashlib
import io
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import psutil
from PIL import Image as Pillow
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from trimtab_model_servers.errors import RefusalError
from trimtab_protocol.chat.image_header import MAX_PIXELS, parse_header, without_metadata

FORMATS: Final = tuple(str(file.format) for file in (PngImageFile, JpegImageFile, WebPImageFile, GifImageFile))
"""Imported by name; otherwise Pillow imports all of its plugins while it opens the first WebP or GIF file."""
_DECODER_ERRORS = (OSError, SyntaxError, ValueError, EOFError, IndexError, TypeError, struct.error)
"""Errors that Pillow's plugins raise on damaged files."""

DECODING_BYTES: Final[Mapping[str, int]] = {"png": 8, "jpeg": 10, "webp": 17, "gif": 8}
"""Peak memory per pixel while Pillow decodes a file of a format and converts it: the image in four bytes, its copy,
JPEG's coefficients (a CMYK file takes 12 bytes), and WebP's two canvases and its frame.
"""
MIN_BUDGET_BYTES: Final = 32 * 2**20
BUDGET_SHARE: Final = 0.8
"""Share for decoding of the memory that a container has left; the rest is for request bodies and embeddings."""
_LIMIT_FILES: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))

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
    format: str = "png"

    def decoding_bytes(self, pixel_bytes: int) -> int:
        """Peak memory of decoding, and of an encoder that then uses ``pixel_bytes`` per pixel."""
        return self.width_px * self.height_px * max(DECODING_BYTES[self.format], pixel_bytes)


def read_image(number: int, content: bytes) -> ImageFile:
    """Check an image's header without decoding it; RefusalError 422 if it is none, 413 above MAX_PIXELS."""
    header = parse_header(content)
    if header is None:
        raise RefusalError(422, f"image {number} is no {', '.join(FORMATS)} file")
    if header.width_px * header.height_px > MAX_PIXELS:
        size = f"{header.width_px} × {header.height_px} pixels; send at most {MAX_PIXELS:,}".replace(",", " ")
        raise RefusalError(413, f"image {number} has {size}")
    return ImageFile(content, header.width_px, header.height_px, hashlib.sha256(content).hexdigest(), header.format)


def decode_image(content: bytes, mode: str) -> Pillow.Image:
    """Decode the first frame in a mode such as ``L`` or ``RGB``; raises BadImage 422."""
    try:
        with Pillow.open(io.BytesIO(without_metadata(content)), formats=FORMATS) as image:
            if image.mode == mode and image.format != "WEBP":  # which keeps its canvases as long as the image
                image.load()
                return image
            return image.convert(mode)
    except _DECODER_ERRORS as error:
        raise BadImage(422, f"cannot be decoded: {error}") from error


class DecodingBudget:
    """Memory of all images that are being decoded; threads wait for their share of it in turn."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._turn = threading.Lock()
        self._freed = threading.Condition()

    @contextlib.contextmanager
    def hold(self, size_bytes: int) -> Iterator[None]:
        """Wait until the bytes are free, and hold them; raises BadImage 413 if they are more than all of the budget."""
        if size_bytes > self._max_bytes:
            raise BadImage(
                413,
                f"takes {size_bytes >> 20} MiB to decode; this replica has {self._max_bytes >> 20} MiB: "
                "send a smaller image, or a PNG or JPEG file instead of WebP",
            )
        with self._turn, self._freed:
            self._freed.wait_for(lambda: self._held_bytes + size_bytes <= self._max_bytes)
            self._held_bytes += size_bytes
        try:
            yield
        finally:
            with self._freed:
                self._held_bytes -= size_bytes
                self._freed.notify()


@cache
def process_budget() -> DecodingBudget:
    """The budget of this process, from its memory at the first image: all of its models are loaded then."""
    return DecodingBudget(max(int(BUDGET_SHARE * (memory_limit_bytes() - _used_bytes())), MIN_BUDGET_BYTES))


def memory_limit_bytes(files: Sequence[Path] = _LIMIT_FILES) -> int:
    """Memory limit of the container, by version 2 or 1 of control groups; at most the memory of the machine."""
    limits = [int(psutil.virtual_memory().total)]
    for file in files:
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int(file.read_text()))
    return min(limits)


def _used_bytes() -> int:
    """Resident memory of this process that is not a file's."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))  # psutil reports shared pages on Linux alone
