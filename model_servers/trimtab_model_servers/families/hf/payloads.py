"""Payloads: rows of BYTES tensors as texts and images, and answers as BYTES. A bad row is its caller's fault."""

import io
from collections.abc import Iterable

import numpy as np
import torch
from PIL import Image as Pillow

from trimtab_model_servers.chat.image_decoder import decode_image, process_budget, read_image
from trimtab_model_servers.errors import InvalidRow, RefusalError
from trimtab_protocol.tensors import Array, bytes_array

PIXEL_BYTES = 16
"""Of an image processor: the pixels in FP32 by channel, and its copies."""


def decode_texts(name: str, rows: Array, max_bytes: int, min_bytes: int = 1) -> list[str]:
    """Texts of a tensor [rows] of UTF-8; InvalidRow if one is too short, too long, or of another encoding."""
    texts = []
    for number, row in enumerate(rows):
        if not min_bytes <= len(row) <= max_bytes:
            problem = f"has {len(row)} bytes; send {min_bytes} to {max_bytes}" if row else "is empty; send text"
            raise InvalidRow(f"input {name!r}: row {number} {problem}")
        try:
            texts.append(row.decode())
        except UnicodeDecodeError as error:
            raise InvalidRow(f"input {name!r}: row {number} is not UTF-8 at byte {error.start}") from error
    return texts


def decode_images(name: str, rows: Array | torch.Tensor) -> list[Pillow.Image]:
    """RGB images of a tensor [rows] of PNG, JPEG, WebP or GIF files, or UINT8 [rows, height, width, 3].

    InvalidRow for any other content, or without pixels.
    """
    if isinstance(rows, torch.Tensor):
        if not rows[:1].numel():
            raise InvalidRow(f"input {name!r}: images of {rows.shape[2]} x {rows.shape[1]} pixels; send at least one")
        return [Pillow.fromarray(pixels) for pixels in rows.cpu().numpy()]
    images = []
    for number, row in enumerate(rows):
        try:
            file = read_image(number, row)
            with process_budget().hold(file.decoding_bytes(PIXEL_BYTES)):
                images.append(decode_image(row, "RGB"))
        except RefusalError as error:
            raise InvalidRow(f"input {name!r}: {error}") from error
    return images


def encode_texts(texts: Iterable[str]) -> Array:
    encoded = [text.encode() for text in texts]
    return bytes_array(encoded, (len(encoded),))


def counts(answers: Iterable[int]) -> Array:
    """Number of results of each row, for an output that others are counted by."""
    return np.fromiter(answers, np.int64)


def encode_images(images: Iterable[Pillow.Image]) -> Array:
    """PNG files, without loss; compressed little, since they go to the next stage."""
    files = [_png(image) for image in images]
    return bytes_array(files, (len(files),))


def _png(image: Pillow.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()
