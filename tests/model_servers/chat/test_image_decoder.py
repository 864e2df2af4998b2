"""Image decoder: metadata is skipped."""

import io
import zlib

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL.PngImagePlugin import PngInfo

from trimtab_model_servers.chat.image_decoder import decode_image
from trimtab_protocol.chat.image_header import without_metadata


def hostile_png(plain: Pillow.Image) -> bytes:
    """A PNG with metadata of 63 MiB in 66 KB."""
    file, texts = io.BytesIO(), PngInfo()
    for number in range(63):
        texts.add_text(f"comment {number}", "a" * (2**20 - 1), zip=True)
    texts.add(b"iCCP", b"profile\0\0" + zlib.compress(bytes(2**20)))
    plain.save(file, "PNG", pnginfo=texts)
    return file.getvalue()


def hostile_jpeg(plain: Pillow.Image) -> bytes:
    """A JPEG with thousands of Exif segments, which a decoder would join one by one."""
    file = io.BytesIO()
    plain.save(file, "JPEG")
    segment = b"\xff\xe1\x00\x18Exif\0\0" + bytes(16)
    return file.getvalue()[:2] + segment * 4000 + file.getvalue()[2:]


@pytest.mark.parametrize(("kind", "hostile"), [("PNG", hostile_png), ("JPEG", hostile_jpeg)])
@pytest.mark.parametrize("mode", ["L", "RGB", "P", "RGBA", "CMYK", "1"])
def test_metadata_is_skipped_and_pixels_stay(mode, kind, hostile):
    noise = np.random.default_rng(1).integers(256, size=(40, 30, 4), dtype=np.uint8)
    picture = Pillow.fromarray(noise).convert("RGB").convert(mode)
    plain = io.BytesIO()
    try:
        picture.save(plain, kind)
    except OSError:
        pytest.skip(f"{kind} has no {mode}")

    file = hostile(picture)

    assert len(without_metadata(file)) <= len(plain.getvalue()) < len(file) // 10
    expected = Pillow.open(plain).convert("RGB")
    assert decode_image(file, "RGB").tobytes() == expected.tobytes()
