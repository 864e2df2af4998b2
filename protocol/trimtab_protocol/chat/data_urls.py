"""Takes data URLs of base64 out of a body before it is read as JSON: images then cost no more than their bytes.

A chat's body is a little JSON around a few very long strings. Read as JSON as a whole it would have to be trusted with
as much JSON as images need, and each string would be copied several times. In JSON a quote that no backslash precedes
begins or ends a string, so a string that begins so is found without reading what is around it.
"""

import binascii
import re
import secrets
from dataclasses import dataclass

from trimtab_protocol import Buffer
from trimtab_protocol.chat.errors import InvalidChat

MIN_DATA_URL_BYTES = 256
"""Shorter ones stay where they are."""
_END = re.compile(rb'"')
_ESCAPES = ((b"\\/", b"/"), (b"\\n", b""), (b"\\r", b""))
"""What encoders of JSON, and of base64, put into base64 that is none of it."""
_MAX_HEAD_BYTES = 200
_HEAD = re.compile(rb"data:[\w.+/\\;=-]{0,%d};base64," % (_MAX_HEAD_BYTES - len("data:;base64,")), re.ASCII)
"""What it says of the image is not believed; bounded, so that many that are none cost little to look at."""
_BEGIN = re.compile(b'"' + _HEAD.pattern + b'[^"]{%d}' % MIN_DATA_URL_BYTES, re.ASCII)
_MAX_BEGIN_BYTES = _MAX_HEAD_BYTES + MIN_DATA_URL_BYTES


@dataclass(frozen=True, slots=True)
class ExtractedImages:
    """A body without its data URLs.

    Attributes:
        json: what is left; each stands as its mark.
        urls: what was taken out, as written, by mark.
    """

    json: bytes
    urls: dict[str, memoryview]


def extract_data_urls(body: Buffer, max_json_bytes: int, max_urls: int) -> ExtractedImages:
    """Take all long data URLs out of a body; they share its memory.

    Args:
        body: JSON, as it came.
        max_json_bytes: of what is left.
        max_urls: how many may be taken out.

    Raises:
        InvalidChat: more is left, or there are more of them, neither read to its end; or one holds a quote.
    """
    view, pieces, urls = memoryview(body).cast("B"), list[bytes](), dict[str, memoryview]()
    nonce = secrets.token_hex(8)  # so that nobody can write a mark himself
    kept = left = 0
    while (found := _next_url(view, kept, kept + max_json_bytes - left)) is not None:
        begin, end = found
        if len(urls) == max_urls:
            message = f"the body has more than {max_urls} images; send at most {max_urls}"
            raise InvalidChat(message, param="messages", code="too_many_images")
        mark = f"lifted:{nonce}:{len(urls)}"
        pieces.append(bytes(view[kept:begin]) + mark.encode())
        urls[mark] = view[begin:end]
        left, kept = left + len(pieces[-1]), end
    left += len(view) - kept
    if left > max_json_bytes:
        raise InvalidChat(f"the body has {left} bytes beside its images; at most {max_json_bytes} are taken")
    return ExtractedImages(b"".join([*pieces, view[kept:]]), urls)


def _next_url(view: memoryview, position: int, begins_before: int) -> tuple[int, int] | None:
    """Where the next data URL begins and ends, without its quotes; None where none begins in time."""
    most = min(len(view), begins_before + _MAX_BEGIN_BYTES)
    while (found := _BEGIN.search(view, position, most)) is not None:
        if not found.start() or view[found.start() - 1] != ord("\\"):
            return found.start() + 1, _end_of_string(view, found.end())
        position = found.end()  # inside another string
    return None


def _end_of_string(view: memoryview, position: int) -> int:
    """Where the quote stands that ends a string; InvalidChat where a backslash is before the first one.

    Whether such a quote ends the string, only a count of backslashes tells. Who sends nothing else would have each
    counted while all others wait, and what holds one is base64 in no case.
    """
    quote = _END.search(view, position)
    if quote is None:
        raise InvalidChat("the body is not JSON: a string has no end")
    if view[quote.start() - 1] == ord("\\"):
        raise InvalidChat("the body has a data URL with a backslash before a quote; base64 has neither")
    return quote.start()


def data_url_payload(url: Buffer, max_bytes: int, param: str) -> memoryview:
    """The base64 of a data URL; raises InvalidChat where it has none, or stands for more bytes."""
    view = memoryview(url).cast("B")
    head = _HEAD.match(view[:_MAX_HEAD_BYTES])
    if head is None:
        raise _invalid("is no data URL of base64; write data:image/png;base64,…", param)
    written = view[head.end() :]
    if len(written) // 4 * 3 > max_bytes + 2:
        raise _invalid(f"has {len(written) // 4 * 3} bytes; send at most {max_bytes}", param)
    return written


def decode_data_url(url: Buffer, max_bytes: int, param: str) -> bytes:
    """The bytes of a data URL.

    Raises:
        InvalidChat: it has more bytes, no base64, or none at all; nothing is decoded of one that is too long.
    """
    written = data_url_payload(url, max_bytes, param)
    try:
        decoded = binascii.a2b_base64(written, strict_mode=True)
    except binascii.Error:
        decoded = _decode_leniently(bytes(written), param)
    if not decoded:
        raise _invalid("is empty", param)
    return decoded


def _decode_leniently(written: bytes, param: str) -> bytes:
    for escape, meant in _ESCAPES:
        written = written.replace(escape, meant)
    try:
        return binascii.a2b_base64(written + b"=" * (-len(written) % 4), strict_mode=True)
    except binascii.Error as error:
        raise _invalid(f"is not base64: {error}", param) from error


def _invalid(what: str, param: str) -> InvalidChat:
    return InvalidChat(f"{param} {what}", param=param, code="invalid_image")
