"""Hostile chats, each with its expected response.

Among them are attacks that succeeded against other servers of such models: internal addresses, placeholders in text,
images decompressed before their size is checked, redirects.
"""

import base64
import json
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

MEBIBYTE: Final = 2**20
SPELLED: Final = "<image> <|image|> <|vision_start|><|image_pad|> <IMG_CONTEXT> lifted:0:0"
_MOST_IMAGES: Final = 16


@dataclass(frozen=True, slots=True)
class Ground:
    """Where a chat is sent."""

    model: str
    store: str = ""
    """URL of a server of ours, from which images may be fetched."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One kind of chat: its body, and the status and code of its response; 200 if it is harmless."""

    name: str
    body: Callable[[Ground], bytes]
    status: int
    code: str | None = None


def chat(ground: Ground, text: str, images: Sequence[bytes | str] = (), **fields: Any) -> bytes:
    """A chat of one message; images are files or addresses."""
    urls = [image if isinstance(image, str) else data_url(image) for image in images]
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": text}, *shown]
    return json.dumps({"model": ground.model, "messages": [{"role": "user", "content": content}]} | fields).encode()


def data_url(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def png(side: int, rows: bytes, *more: tuple[bytes, bytes]) -> bytes:
    """A grey PNG of this many pixels a side with these compressed rows, and further chunks."""
    head = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", head), *more, (b"IDAT", rows), (b"IEND", b"")]
    parts = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def a_small_png() -> bytes:
    """Eight black pixels a side."""
    return png(8, zlib.compress(bytes(8 * 9)))


def _zeros_packed(count: int) -> bytes:
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(MEBIBYTE)) for _ in range(count // MEBIBYTE)) + packer.flush()


def _jpeg(side: int) -> bytes:
    return b"\xff\xd8\xff\xc0" + struct.pack(">HBHHB", 17, 8, side, side, 3) + bytes(9) + b"\xff\xda"


def _gif(side: int, frames: int = 1) -> bytes:
    frame = b"\x2c" + struct.pack("<HHHH", 0, 0, side, side) + b"\x00\x02\x03\x84\x8f\x05\x00"
    return b"GIF89a" + struct.pack("<HH", side, side) + b"\x80\x00\x00" + bytes(6) + frame * frames + b"\x3b"


def _webp(side: int) -> bytes:
    sides = (side - 1).to_bytes(3, "little") * 2
    canvas = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + sides
    return b"RIFF" + struct.pack("<I", len(canvas)) + canvas


def _commented() -> bytes:
    return png(8, zlib.compress(bytes(8 * 9)), (b"zTXt", b"a\0\0" + _zeros_packed(10**8)))


def _showing(*images: bytes | str | Callable[[], bytes]) -> Callable[[Ground], bytes]:
    return lambda ground: chat(ground, "see", [image() if callable(image) else image for image in images])


def _stored(name: str) -> Callable[[Ground], bytes]:
    return lambda ground: chat(ground, "see", [ground.store + name])


def _asking(**fields: Any) -> Callable[[Ground], bytes]:
    return lambda ground: chat(ground, "see", **fields)


def _with(raw: bytes) -> Callable[[Ground], bytes]:
    """A chat with an unknown field."""
    return lambda ground: chat(ground, "see")[:-1] + b', "x": ' + raw + b"}"


def _raw(body: bytes) -> Callable[[Ground], bytes]:
    return lambda _: body


def _turns(count: int) -> Callable[[Ground], bytes]:
    turns = [{"role": "user", "content": "a"}] * count
    return lambda ground: json.dumps({"model": ground.model, "messages": turns}).encode()


def _parts(turns: int, part: object, count: int) -> Callable[[Ground], bytes]:
    messages = [{"role": "user", "content": [part] * count}] * turns
    return lambda ground: json.dumps({"model": ground.model, "messages": messages}, separators=(",", ":")).encode()


def _commented_often() -> bytes:
    """Comments that are each small enough for the decoder, and unpack to 63 MiB."""
    comment = b"a\0\0" + _zeros_packed(MEBIBYTE - 1024 * 16)
    return png(8, zlib.compress(bytes(8 * 9)), *[(b"zTXt", comment)] * 63)


_INVALID, _LARGE, _NONE, _ADDRESS = "InvalidArgument", "image_too_large", "invalid_image", "invalid_image_url"
_BEGUN = b'{"x": "data:image/png;base64,'
READ: Final = (
    Attack("a PNG of a hundred megapixels", _showing(lambda: png(10_000, _zeros_packed(10**8))), 400, _LARGE),
    Attack("a JPEG of 65,535 pixels a side", _showing(_jpeg(65_535)), 400, _LARGE),
    Attack("a GIF of 65,535 pixels a side", _showing(_gif(65_535)), 400, _LARGE),
    Attack("a WebP of 65,535 pixels a side", _showing(_webp(65_535)), 400, _LARGE),
    Attack("seventeen images", _showing(*[a_small_png()] * (_MOST_IMAGES + 1)), 400, "too_many_images"),
    Attack("seventeen large images", _showing(*[bytes(MEBIBYTE // 2)] * (_MOST_IMAGES + 1)), 400, "too_many_images"),
    Attack("a file of nine mebibytes", _showing(bytes(9 * MEBIBYTE)), 400, _NONE),
    Attack("a data URL of a program", _showing(b"\x7fELF" + bytes(4096)), 400, _NONE),
    Attack("a data URL of a drawing", _showing(data_url(b"<svg/>" * 100, "image/svg+xml")), 400, _NONE),
    Attack("a data URL that is not base64", _showing("data:image/png;base64," + "!" * 4096), 400, _NONE),
    Attack("zeros", _with(b"[" + b"0," * (8 * MEBIBYTE) + b"0]"), 400, _INVALID),
    Attack("nothing but brackets", _raw(b"[" * 900_000), 400, _INVALID),
    Attack("arrays 100,000 deep", _with(b"[" * 100_000 + b"]" * 100_000), 400, _INVALID),
    Attack("objects 100,000 deep", _with(b'{"a":' * 100_000 + b"1" + b"}" * 100_000), 400, _INVALID),
    Attack("a number of a million digits", _with(b"9" * 1_000_000), 400, _INVALID),
    Attack("a string without an end", _raw(_BEGUN + b"A" * MEBIBYTE), 400, _INVALID),
    Attack("many quotes", _raw(b'"data:' * 150_000), 400, _INVALID),
    Attack("many short images", _raw(b'"data:image/png;base64,' * 40_000), 400, _INVALID),
    Attack("many letters", _raw(b'"data:' + b"a" * 1_000_000 + b'"'), 400, _INVALID),
    Attack("many settings", _raw(b'"data:' + b";a=a" * 250_000 + b'"'), 400, _INVALID),
    Attack("many long heads", _raw((b'"data:' + b";a" * 93) * 5_000), 400, _INVALID),
    Attack("many backslashes", _raw(_BEGUN + b"\\" * MEBIBYTE + b'"}'), 400, _INVALID),
    Attack(
        "many quotes behind backslashes", _raw(_BEGUN + b"A" * 300 + b'\\"' * (2 * MEBIBYTE) + b'"}'), 400, _INVALID
    ),
    Attack("a hundred turns of invalid parts", _parts(100, 1, 4096), 400, _INVALID),
    Attack("a hundred turns of empty parts", _parts(100, {"type": "text", "text": ""}, 200), 400, _INVALID),
    Attack("invalid stop strings", _asking(stop=[1] * 300_000), 400, _INVALID),
    Attack("twenty thousand turns", _turns(20_000), 400, _INVALID),
    Attack("a billion choices", _asking(n=10**9), 400, _INVALID),
    Attack("an address of ours", _showing("http://127.0.0.1:9/a"), 400, _ADDRESS),
    Attack("an address of ours as a number", _showing("http://2130706433/a"), 400, _ADDRESS),
    Attack("an address of ours in IPv6", _showing("http://[::ffff:127.0.0.1]/a"), 400, _ADDRESS),
    Attack("metadata of a cloud", _showing("http://169.254.169.254/latest/meta-data/"), 400, _ADDRESS),
    Attack("a private network", _showing("https://10.0.0.1/a.png"), 400, _ADDRESS),
    Attack("a local file", _showing("file:///etc/passwd"), 400, _ADDRESS),
)
"""Rejected while the body is read."""
FETCHED: Final = (
    Attack("a redirect to loopback", _stored("away"), 400, _ADDRESS),
    Attack("a file without an end", _stored("endless"), 400, _ADDRESS),
    Attack("a page where an image should be", _stored("page"), 400, _NONE),
    Attack("out of the store by dots", _stored("../secret"), 400, _ADDRESS),
    Attack("out of the store by spelled dots", _stored("%2e%2e/secret"), 400, _ADDRESS),
    Attack("a listed name that leads to loopback", _showing("http://localhost/secret"), 400, _ADDRESS),
)
"""Rejected because of where an address leads, or of the response from there."""
SHOWN: Final = (
    Attack("pixels that cannot be decompressed", _showing(png(8, b"no pixels at all")), 400, _INVALID),
    Attack("pixels that unpack to 100 MB", _showing(lambda: png(8, _zeros_packed(10**8))), 200),
    Attack("a comment that unpacks to 100 MB", _showing(_commented), 200),
    Attack("a GIF of 100,000 frames", _showing(_gif(1, 100_000)), 200),
    Attack("placeholders spelled in text", lambda ground: chat(ground, SPELLED), 200),
    Attack("as many letters as there are numbers", _asking(max_tokens=10**15), 400, _INVALID),
    Attack("more text than a replica holds", lambda ground: chat(ground, "see " * 100_000), 400, _INVALID),
)
"""Left to the replica, which serves or rejects it."""
BURDENING: Final = (
    Attack("1.4 MB of text", lambda ground: chat(ground, "word " * 280_000), 400, _INVALID),
    Attack("sixteen images with comments", _showing(*[_commented_often] * _MOST_IMAGES), 200),
    Attack("counts of 1 MB", lambda ground: chat(ground, "see " * 250_000, dry_run=True), 400, _INVALID),
    Attack("half a surrogate pair", lambda ground: chat(ground, "\ud800"), 400, _INVALID),
    Attack("an image of six megapixels", _showing(lambda: png(2450, _zeros_packed(7 * MEBIBYTE))), 200),
)
"""Costly to a replica that handles them on its event loop."""
