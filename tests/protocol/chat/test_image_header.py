"""Image sizes from file headers, equal to those of Pillow."""

import contextlib
import io
import struct
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_protocol.chat.image_header import read_header
from trimtab_protocol.errors import InvalidChat

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")
SIDES = st.integers(1, 300)


def a_file(kind, width, height, mode="RGB", **options):
    buffer = io.BytesIO()
    Image.new(mode, (width, height)).save(buffer, kind, **options)
    return buffer.getvalue()


@given(
    st.sampled_from(
        [
            ("PNG", {}),
            ("PNG", {"mode": "1"}),
            ("JPEG", {}),
            ("JPEG", {"progressive": True, "comment": b"x" * 999}),
            ("JPEG", {"mode": "L", "exif": Image.Exif().tobytes() + bytes(5000), "dpi": (72, 72)}),
            ("GIF", {"mode": "P", "comment": b"y" * 600}),
            ("WEBP", {}),
            ("WEBP", {"lossless": True}),
            ("WEBP", {"mode": "RGBA", "icc_profile": bytes(200)}),
        ]
    ),
    SIDES,
    SIDES,
)
def test_sizes_match_the_decoder(how, width, height):
    kind, options = how
    header = read_header(a_file(kind, width, height, **options), "image")

    assert (header.format, header.width_px, header.height_px) == (kind.lower(), width, height)


def test_oversized_image_is_rejected_by_its_header():
    file = b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR" + struct.pack(">II", 10_000, 10_000) + bytes(50)

    with pytest.raises(InvalidChat, match="10000 × 10000 pixels; send at most 40000000") as caught:
        read_header(file, "messages[0].content[0].image_url")
    assert caught.value.code == "image_too_large"


def test_gif_frame_larger_than_its_screen_counts():
    file = bytearray(a_file("GIF", 10, 10, mode="P"))
    frame = file.index(b"\x2c\x00\x00\x00\x00\x0a\x00\x0a\x00")
    file[frame + 5 : frame + 9] = struct.pack("<HH", 65535, 65535)

    with pytest.raises(InvalidChat, match="65535 × 65535"):
        read_header(bytes(file), "image")


def test_largest_jpeg_frame_size_counts():
    small, large = a_file("JPEG", 8, 8), b"\xff\xc2" + struct.pack(">HBHHB", 8, 8, 60_000, 60_000, 0)
    start = small.index(b"\xff\xda")

    with pytest.raises(InvalidChat, match="60000 × 60000"):
        read_header(small[:start] + large + small[start:], "image")


@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"\xff\xd8" + b"\xff\xe1\x00\x02" * 2**20,
        b"\xff\xd8" + b"\xff" * 2**20,
        b"GIF89a" + bytes(7) + b"\x21\xfe" + b"\x01a" * 2**20,
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"RIFF\x00\x00\x00\x00WEBPVP8X",
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\x0dIHDR" + bytes(8),
    ],
)
def test_other_files_are_rejected(file):
    began = time.process_time()
    with pytest.raises(InvalidChat, match="not a PNG, JPEG, WebP or GIF"):
        read_header(file, "image")
    assert time.process_time() - began < 0.05


def test_corrupt_files_are_parsed_or_rejected():
    files = [a_file(kind, 64, 48) for kind in ("PNG", "JPEG", "WEBP", "GIF")]
    random = np.random.default_rng(5)
    for file in files:
        for _ in range(200):
            damaged = bytearray(file[: random.integers(1, len(file))])
            damaged[random.integers(len(damaged))] = random.integers(256)
            with contextlib.suppress(InvalidChat):
                header = read_header(bytes(damaged), "image")
                assert 0 < header.width_px * header.height_px <= 40_000_000
