"""Images of chats: sizes from file headers, and URLs that a router may fetch."""

import contextlib
import io
import struct
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_pipelines.chat_settings import ImageLimits
from trimtab_protocol.chat.image_header import read_header
from trimtab_protocol.chat.image_urls import is_public, parse_target
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


BOUNDS = ImageLimits(allowed_domains=("images.example",), trusted_prefixes=("http://minio.models:9000/images/",))


@pytest.mark.parametrize(
    ("address", "own"),
    [
        ("https://images.example/a.png", False),
        ("https://IMAGES.example:443/a.png?size=2#x", False),
        ("http://images.example/a.png", False),
        ("http://minio.models:9000/images/a%20b.png?X-Amz-Signature=1", True),
    ],
)
def test_allowed_urls_are_accepted(address, own):
    assert parse_target(address, "f", BOUNDS).trusted is own


@pytest.mark.parametrize(
    "address",
    [
        "https://images.example.evil.net/a.png",
        "https://images.example@evil.net/a.png",
        "https://evil.net\\@images.example/a.png",
        "https://evil.net#@images.example/a.png",
        "https://user:pass@images.example/a.png",
        "https://images.example:8080/a.png",
        "https://images.example./a.png",
        "https://sub.images.example/a.png",
        "http://127.0.0.1/a.png",
        "http://0x7f.1/a.png",
        "file:///etc/passwd",
        "//images.example/a.png",
        "images.example/a.png",
        "http://minio.models:9000/secrets/a.png",
        "http://minio.models:9000/images/../secrets/a.png",
        "http://minio.models:9000/images/%2e%2e/secrets/a.png",
        "http://minio.models:9000/imagesecrets/a.png",
        "https://minio.models:9000/images/a.png",
        "http://minio.models/images/a.png",
        "http://images.example/\r\nHost: evil.net",
        "http://images.example/ a.png",
        "http://imаges.example/a.png",
        "http://images.example:99999/a.png",
        "http://[::1/a.png",
        "https://images.example/" + "a" * 5000,
        "",
    ],
)
def test_other_urls_are_rejected(address):
    with pytest.raises(InvalidChat) as caught:
        parse_target(address, "messages[0].content[0].image_url", BOUNDS)
    assert caught.value.code == "invalid_image_url"


def test_ip_addresses_are_rejected_even_if_listed():
    bounds = ImageLimits(allowed_domains=("10.0.0.1", "0x7f.1", "127.1"))
    for host in ("10.0.0.1", "127.1"):
        with pytest.raises(InvalidChat):
            parse_target(f"http://{host}/a.png", "f", bounds)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("2002:7f00:1::", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b:1::1", False),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", False),
    ],
)
def test_public_addresses_are_recognized(address, expected):
    assert is_public(address) is expected
