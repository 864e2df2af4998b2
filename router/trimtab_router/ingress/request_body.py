"""Reads request bodies, decompressed if needed, within bounds on memory and time.

Memory is reserved as bytes arrive or are decompressed, not by an announced length. The server must not decompress
bodies itself (`auto_decompress=False`).
"""

import asyncio
import zlib
from collections.abc import Iterator

import numpy as np
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from trimtab_protocol import Buffer
from trimtab_router.admission.memory_budget import Reservation
from trimtab_router.admission.uploads import Upload, Uploads
from trimtab_router.refusal import Refusal, invalid

_CHUNK_BYTES = 256 * 1024  # bytes decompressed before other requests get a turn
_ZLIB_METHOD = 8
_IDENTITY = frozenset({"", "identity"})


async def read_body(
    request: web.BaseRequest, reservation: Reservation, max_bytes: int, uploads: Uploads, advice: str = ""
) -> memoryview:
    """Read a body, read-only. Raises Refusal: 413 too large, 408 too slow, 429 memory is short, 400 unreadable."""
    length = request.content_length
    if length is not None and length > max_bytes:
        raise too_large(f"the body has {length} bytes", max_bytes, advice)
    if "Expect" in request.headers:
        await _send_continue(request)
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    try:
        if length is not None and encoding in _IDENTITY and request.content.is_eof():  # a small body that has arrived
            reservation.grow(length)
            return memoryview(request.content.read_nowait())
        async with uploads.receive(reservation) as upload:
            if encoding not in _IDENTITY:
                decompression = Decompression(encoding, "the body", reservation, max_bytes, advice)
                body = await _decompress(request, upload, decompression)
            elif length is None:
                body = await _read_without_length(request, upload, reservation, max_bytes, advice)
            else:
                body = await _read_with_length(request, upload, reservation, length)
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise invalid(f"the body cannot be read: {error}") from error
    return memoryview(body).toreadonly()


class Decompression:
    """A gzip or deflate stream, decompressed chunk by chunk into one buffer that is reserved as it grows."""

    def __init__(self, encoding: str, subject: str, reservation: Reservation, max_bytes: int, advice: str = "") -> None:
        if encoding not in {"gzip", "x-gzip", "deflate"}:
            raise invalid(f"{subject} has encoding {encoding!r}; use gzip, deflate or none")
        self._encoding = encoding
        self._subject = subject
        self._reservation = reservation
        self._max_bytes = max_bytes
        self._advice = advice
        self._decompressor: zlib._Decompress | None = None
        self._body = bytearray()

    async def feed(self, compressed: Buffer) -> None:
        """Decompress more bytes. Refusal: 413 beyond the bound, 429 if memory is short, 400 for an invalid stream."""
        if not compressed:
            return  # the first byte shows the framing; `finished` reports an empty stream
        try:
            for chunk in self._chunks(compressed):
                if len(self._body) + len(chunk) > self._max_bytes:
                    raise too_large(f"{self._subject} decompresses to more", self._max_bytes, self._advice)
                self._reservation.grow(len(chunk))
                self._body += chunk
                await asyncio.sleep(0)
        except zlib.error as error:
            raise invalid(f"{self._subject} is not {self._encoding}: {error}") from error

    def finished(self) -> bytearray:
        """The decompressed bytes. Raises Refusal 400 if the stream is incomplete."""
        if self._decompressor is None or not self._decompressor.eof or self._decompressor.unused_data:
            raise invalid(f"{self._subject} is not one whole {self._encoding} stream")
        return self._body

    def _chunks(self, compressed: Buffer) -> Iterator[bytes]:
        remaining: Buffer = compressed
        if self._decompressor is None:
            self._decompressor = zlib.decompressobj(self._window_bits(compressed))
        while True:
            chunk = self._decompressor.decompress(remaining, _CHUNK_BYTES)
            if chunk:
                yield chunk
            remaining = self._decompressor.unconsumed_tail
            if self._decompressor.eof or (not remaining and len(chunk) < _CHUNK_BYTES):
                return

    def _window_bits(self, compressed: Buffer) -> int:
        if self._encoding != "deflate":
            return 16 + zlib.MAX_WBITS
        return (
            zlib.MAX_WBITS if compressed[0] & 15 == _ZLIB_METHOD else -zlib.MAX_WBITS
        )  # some clients send raw deflate


def too_large(subject: str, max_bytes: int, advice: str = "") -> Refusal:
    message = f"{subject}; at most {max_bytes} bytes are accepted{'; ' + advice if advice else ''}"
    return Refusal("PayloadTooLarge", message)


async def _send_continue(request: web.BaseRequest) -> None:
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0


async def _decompress(request: web.BaseRequest, upload: Upload, decompression: "Decompression") -> Buffer:
    while chunk := await request.content.readany():
        upload.note_bytes(len(chunk))
        await decompression.feed(chunk)
    return decompression.finished()


async def _read_with_length(request: web.BaseRequest, upload: Upload, reservation: Reservation, length: int) -> Buffer:
    first = await request.content.readany()
    upload.note_bytes(len(first))
    reservation.grow(len(first))
    if len(first) == length:
        return first
    body = np.empty(length, np.uint8).data  # pages are allocated as bytes arrive, whatever the announced length
    body[: len(first)] = first
    position = len(first)
    while chunk := await request.content.readany():
        upload.note_bytes(len(chunk))
        reservation.grow(len(chunk))
        body[position : position + len(chunk)] = chunk
        position += len(chunk)
    if position != length:
        raise invalid(f"the body ended after {position} of its {length} bytes")
    return body


async def _read_without_length(
    request: web.BaseRequest, upload: Upload, reservation: Reservation, max_bytes: int, advice: str
) -> Buffer:
    body = bytearray()
    while chunk := await request.content.readany():
        upload.note_bytes(len(chunk))
        if len(body) + len(chunk) > max_bytes:
            raise too_large(f"the body has more than {max_bytes} bytes", max_bytes, advice)
        reservation.grow(len(chunk))
        body += chunk
    return body
