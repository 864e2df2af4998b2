"""Image decoder: metadata is skipped, and decoding stays within a budget that follows from the memory limit."""

import io
import subprocess
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL.PngImagePlugin import PngInfo

from trimtab_model_servers.chat.image_decoder import BadImage, DecodingBudget, decode_image, memory_limit_bytes
from trimtab_protocol.chat.image_header import MAX_PIXELS, without_metadata

MEASURE = """
import sys
from pathlib import Path
from trimtab_model_servers.chat.image_decoder import decode_image, read_image

def peak_bytes():
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

image = read_image(0, Path(sys.argv[1]).read_bytes())
decode_image(image.content[:0] + Path(sys.argv[2]).read_bytes(), "RGB")
Path("/proc/self/clear_refs").write_text("5")
before = peak_bytes()
decode_image(image.content, "RGB")
print(peak_bytes() - before, image.decoding_bytes(0))
"""
LARGEST: dict[str, tuple[str, dict[str, Any]]] = {
    "png": ("RGBA", {}),
    "jpeg": ("RGB", {"progressive": True, "subsampling": 0}),
    "webp": ("RGB", {"method": 0}),
    "gif": ("P", {"transparency": 3, "disposal": 2}),
}
SLACK_BYTES = 8 * 2**20


def saved(kind: str, mode: str, side: int, **options: Any) -> bytes:
    file = io.BytesIO()
    Pillow.new(mode, (side, side), (3, 4, 5, 6)[: len(mode)] if mode.startswith("RGB") else 3).save(
        file, kind, **options
    )
    return file.getvalue()


@pytest.mark.parametrize("kind", LARGEST)
def test_largest_image_decodes_within_its_bytes(tmp_path: Path, kind):
    mode, options = LARGEST[kind]
    paths = [tmp_path / "large", tmp_path / "small"]
    for path, side in zip(paths, (int(MAX_PIXELS**0.5), 8), strict=True):
        path.write_bytes(saved(kind, mode, side, **options))

    measured = subprocess.run([sys.executable, "-c", MEASURE, *paths], capture_output=True, text=True, check=True)

    used, expected = map(int, measured.stdout.split())
    assert used < expected + SLACK_BYTES


def test_decoding_waits_until_its_bytes_are_free():
    budget, begun, others = DecodingBudget(100), threading.Event(), threading.Event()

    def decode(size: int, event: threading.Event) -> None:
        with budget.hold(size):
            event.set()

    with ThreadPoolExecutor(2) as threads:
        with budget.hold(60):
            threads.submit(decode, 41, begun)
            threads.submit(decode, 30, others)  # small, but later
            assert not begun.wait(0.05)
            assert not others.is_set()
        assert begun.wait(10)
        assert others.wait(10)


def test_image_beyond_the_whole_budget_is_refused():
    with pytest.raises(BadImage) as refused, DecodingBudget(100).hold(101):
        pass
    assert refused.value.status_code == 413


def test_budget_follows_the_limit_of_the_container(tmp_path: Path):
    version_1, version_2, unlimited = tmp_path / "1", tmp_path / "2", tmp_path / "unlimited"
    version_1.write_text("9223372036854771712\n")
    version_2.write_text(f"{2**30}\n")
    unlimited.write_text("max\n")

    assert memory_limit_bytes([version_2, tmp_path / "none"]) == 2**30
    machine = memory_limit_bytes([unlimited, tmp_path / "none"])
    assert memory_limit_bytes([version_1]) == machine > 2**30


def hostile_png(plain: Pillow.Image) -> bytes:
    """A PNG with metadata of 66 MiB in 68 KB, more than Pillow accepts."""
    file, texts = io.BytesIO(), PngInfo()
    for number in range(66):
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


MODES = {"PNG": ("L", "RGB", "P", "RGBA", "1"), "JPEG": ("L", "RGB", "CMYK", "1")}


@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind, modes in MODES.items() for mode in modes])
def test_metadata_is_skipped_and_pixels_stay(kind, mode):
    noise = np.random.default_rng(1).integers(256, size=(40, 30, 4), dtype=np.uint8)
    picture = Pillow.fromarray(noise).convert("RGB").convert(mode)
    plain = io.BytesIO()
    picture.save(plain, kind)

    file = {"PNG": hostile_png, "JPEG": hostile_jpeg}[kind](picture)

    assert len(without_metadata(file)) <= len(plain.getvalue()) < len(file) // 10
    expected = Pillow.open(plain).convert("RGB")
    assert decode_image(file, "RGB").tobytes() == expected.tobytes()
