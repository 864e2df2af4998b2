"""Extraction of base64 from a body before it is parsed as JSON: data URLs, and the `data` of `input_audio`.

A chat's body is a little JSON around a few very long strings. Parsing the complete body would require a JSON limit as
large as the images, and copy each string several times. In JSON an unescaped quote begins or ends a string, so a data
URL is found without parsing its context.
"""

import binascii
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from pybase64 import b64decode

from trimtab_protocol import Buffer
from trimtab_protocol.errors import InvalidChat

MEDIA_MARKER = b"image:"
"""How a marker begins."""
MIN_DATA_URL_BYTES = 256
"""Shorter data URLs are not extracted."""
_MARKER = re.compile(rb'(?<=")(%s[0-9a-f]+:[0-9]+)(?=")' % MEDIA_MARKER)
_ESCAPES = ((b"\\/", b"/"), (b"\\n", b""), (b"\\r", b""))
"""JSON escapes and line breaks within base64."""
_MAX_HEAD_BYTES = 200
_HEAD = re.compile(rb"data:[\w.+/\\;=-]{0,%d};base64," % (_MAX_HEAD_BYTES - len("data:;base64,")), re.ASCII)
"""The media type is ignored; the length is bounded, so that mismatches are cheap."""
_BEGIN = re.compile(
    b'"(?:%s[^"]{%d}|data"\\s{0,8}:\\s{0,8}"(?P<raw>[A-Za-z0-9+/]{%d}))'
    % (_HEAD.pattern, MIN_DATA_URL_BYTES, MIN_DATA_URL_BYTES),
    re.ASCII,
)
_MAX_BEGIN_BYTES = _MAX_HEAD_BYTES + MIN_DATA_URL_BYTES
_PIECE_BYTES = 2**16
"""Bytes that are copied at once to be searched: `bytes.find` is several times as fast as a regular expression."""


@dataclass(frozen=True, slots=True)
class ExtractedImages:
    """A body without its data URLs."""

    json: bytes
    """The remaining JSON; each data URL is replaced by its marker."""
    urls: dict[str, memoryview]
    """Extracted data URLs, as sent, by marker."""


def extract_data_urls(body: Buffer, max_json_bytes: int, max_urls: int) -> ExtractedImages:
    """Extract all long data URLs from a body, which leaves at most `max_json_bytes`; they share its memory.

    Raises InvalidChat if a limit is exceeded (the rest is not read), or a data URL contains a quote.
    """
    view, parts, urls = memoryview(body).cast("B"), list[bytes](), dict[str, memoryview]()
    nonce = secrets.token_hex(8)  # clients cannot predict a marker
    position = json_bytes = 0
    while (found := _next_url(view, position, position + max_json_bytes - json_bytes)) is not None:
        begin, end = found
        if len(urls) == max_urls:
            message = f"the body has more than {max_urls} images; send at most {max_urls}"
            raise InvalidChat(message, param="messages", code="too_many_images")
        marker = f"{MEDIA_MARKER.decode()}{nonce}:{len(urls)}"
        parts.append(bytes(view[position:begin]) + marker.encode())
        urls[marker] = view[begin:end]
        json_bytes, position = json_bytes + len(parts[-1]), end
    json_bytes += len(view) - position
    if json_bytes > max_json_bytes:
        raise InvalidChat(f"the body has {json_bytes} bytes beside its images; at most {max_json_bytes} are accepted")
    return ExtractedImages(b"".join([*parts, view[position:]]), urls)


def restore_data_urls(written: bytes, urls: Mapping[bytes, Buffer]) -> list[Buffer]:
    """JSON with data URLs in the places of their markers."""
    pieces = _MARKER.split(written) if urls else [written]
    return [urls.get(piece, piece) if index % 2 else piece for index, piece in enumerate(pieces)]


def _next_url(view: memoryview, position: int, begins_before: int) -> tuple[int, int] | None:
    """Begin and end of the next data URL, without its quotes; None if none begins in time."""
    end = min(len(view), begins_before + _MAX_BEGIN_BYTES)
    while (found := _BEGIN.search(view, position, end)) is not None:
        if not found.start() or view[found.start() - 1] != ord("\\"):
            begin = found.start() + 1 if found["raw"] is None else found.start("raw")
            return begin, _end_of_string(view, found.end())
        position = found.end()  # inside another string
    return None


def _end_of_string(view: memoryview, position: int) -> int:
    """Index of the quote that ends a string; InvalidChat if a backslash precedes the first quote.

    Deciding whether an escaped quote ends the string would require counting backslashes, which blocks the event loop on
    malicious input; base64 contains neither.
    """
    for begin in range(position, len(view), _PIECE_BYTES):
        quote = bytes(view[begin : begin + _PIECE_BYTES]).find(b'"')
        if quote >= 0:
            break
    else:
        raise InvalidChat("the body is not JSON: a string has no end")
    if view[begin + quote - 1] == ord("\\"):
        raise InvalidChat("the body has a data URL with a backslash before a quote; base64 has neither")
    return begin + quote


def data_url_payload(url: Buffer, max_bytes: int, param: str) -> memoryview:
    """The base64 of a data URL; InvalidChat if it is none, or too large."""
    view = memoryview(url).cast("B")
    head = _HEAD.match(view[:_MAX_HEAD_BYTES])
    if head is None:
        raise _invalid("is not a base64 data URL; write data:image/png;base64,…", param)
    written = view[head.end() :]
    if len(written) // 4 * 3 > max_bytes + 2:
        raise _invalid(f"has {len(written) // 4 * 3} bytes; send at most {max_bytes}", param)
    return written


def decode_data_url(url: Buffer, max_bytes: int, param: str) -> bytes:
    """The bytes of a data URL; InvalidChat if it is empty, not base64, or, before decoding, too large."""
    written = data_url_payload(url, max_bytes, param)
    try:
        decoded = b64decode(written, validate=True)
    except binascii.Error:
        decoded = _decode_leniently(bytes(written), param)
    if not decoded:
        raise _invalid("is empty", param)
    return decoded


def _decode_leniently(written: bytes, param: str) -> bytes:
    for escape, meant in _ESCAPES:
        written = written.replace(escape, meant)
    try:
        return b64decode(written + b"=" * (-len(written) % 4), validate=True)
    except binascii.Error as error:
        raise _invalid(f"is not base64: {error}", param) from error


def _invalid(what: str, param: str) -> InvalidChat:
    return InvalidChat(f"{param} {what}", param=param, code="invalid_image")
