"""Reads a request's body into memory that was asked for: as it comes, in bounded time, unpacked within bounds.

What a client announces reserves nothing; what arrives does, unpacked bytes as they are unpacked. Both front doors read
their bodies here. The server in front must not unpack bodies itself (`auto_decompress=False`).
"""

import asyncio
import zlib
from collections.abc import Iterator

import numpy as np
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from trimtab_pipelines.error_codes import ErrorCode
from trimtab_protocol import Buffer
from trimtab_router.admission.memory_budget import Reservation
from trimtab_router.refusal import Refusal, invalid, oversize

_PIECE_BYTES = 256 * 1024
"""Unpacked at a time, between which others have their turn."""
_ZLIB_METHOD = 8
_IDENTITY = frozenset({"", "identity"})


async def read_body(
    request: web.BaseRequest, reservation: Reservation, most_bytes: int, seconds: float, advice: str = ""
) -> memoryview:
    """Read the body of a request, read-only; the reservation grows with it.

    Args:
        request: nothing of its body was read yet.
        reservation: of this request.
        most_bytes: of the body, unpacked.
        seconds: within which it must be here.
        advice: what to do with a larger body.

    Raises:
        Refusal: 413 where it is too large, 408 where it is too slow, 429 without room, 400 where it cannot be read.
    """
    length = request.content_length
    if length is not None and length > most_bytes:
        raise too_large(f"the body has {length} bytes", most_bytes, advice)
    await _continue(request)
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    try:
        if length is not None and encoding in _IDENTITY and request.content.is_eof():  # a small one, already here
            reservation.grow(length)
            return memoryview(request.content.read_nowait())
        async with asyncio.timeout(seconds):
            with reservation.receiving():
                if encoding not in _IDENTITY:
                    body = await _unpack(request, Decompression(encoding, "the body", reservation, most_bytes, advice))
                elif length is None:
                    body = await _read_growing(request, reservation, most_bytes, advice)
                else:
                    body = await _read_known(request, reservation, length)
    except TimeoutError as error:
        message = f"the body did not arrive within {seconds:.0f} s; send it faster, or in smaller requests"
        raise Refusal(ErrorCode.REQUEST_TIMEOUT, "BodyTimeout", message) from error
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise invalid(f"the body cannot be read: {error}") from error
    return memoryview(body).toreadonly()


class Decompression:
    """A gzip or deflate stream that is unpacked piece by piece into one buffer, each piece reserved when it is there.

    Args:
        encoding: gzip or deflate.
        what: is unpacked, for messages.
        reservation: grows with it.
        most_bytes: unpacked.
        advice: what to do with more.

    Raises:
        Refusal: for another encoding.
    """

    def __init__(self, encoding: str, what: str, reservation: Reservation, most_bytes: int, advice: str = "") -> None:
        if encoding not in {"gzip", "x-gzip", "deflate"}:
            raise invalid(f"{what} is packed as {encoding!r}; use gzip, deflate or none")
        self._encoding = encoding
        self._what = what
        self._reservation = reservation
        self._most_bytes = most_bytes
        self._advice = advice
        self._unpacker: zlib._Decompress | None = None
        self._body = bytearray()

    async def feed(self, packed: Buffer) -> None:
        """Unpack the next bytes; Refusal 413 beyond the bound, 429 without room, 400 for what is not so packed."""
        if not packed:
            return  # how a stream is framed its first byte tells; of one without any, `finished` tells
        try:
            for piece in self._pieces(packed):
                if len(self._body) + len(piece) > self._most_bytes:
                    raise too_large(f"{self._what} unpacks to more", self._most_bytes, self._advice)
                self._reservation.grow(len(piece))
                self._body += piece
                await asyncio.sleep(0)
        except zlib.error as error:
            raise invalid(f"{self._what} is not {self._encoding}: {error}") from error

    def finished(self) -> bytearray:
        """All of it; Refusal 400 where its end is missing."""
        if self._unpacker is None or not self._unpacker.eof or self._unpacker.unused_data:
            raise invalid(f"{self._what} is not one whole {self._encoding} stream")
        return self._body

    def _pieces(self, packed: Buffer) -> Iterator[bytes]:
        left: Buffer = packed
        if self._unpacker is None:
            self._unpacker = zlib.decompressobj(self._window_bits(packed))
        while True:
            piece = self._unpacker.decompress(left, _PIECE_BYTES)
            if piece:
                yield piece
            left = self._unpacker.unconsumed_tail
            if self._unpacker.eof or (not left and len(piece) < _PIECE_BYTES):
                return

    def _window_bits(self, packed: Buffer) -> int:
        if self._encoding != "deflate":
            return 16 + zlib.MAX_WBITS
        return zlib.MAX_WBITS if packed[0] & 15 == _ZLIB_METHOD else -zlib.MAX_WBITS  # some send it without its frame


def too_large(what: str, most_bytes: int, advice: str = "") -> Refusal:
    """The refusal of a body beyond a bound."""
    message = f"{what}; at most {most_bytes} bytes are taken{'; ' + advice if advice else ''}"
    return oversize(message)


async def _continue(request: web.BaseRequest) -> None:
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0


async def _unpack(request: web.BaseRequest, unpacking: "Decompression") -> Buffer:
    while chunk := await request.content.readany():
        await unpacking.feed(chunk)
    return unpacking.finished()


async def _read_known(request: web.BaseRequest, reservation: Reservation, length: int) -> Buffer:
    first = await request.content.readany()
    reservation.grow(len(first))
    if len(first) == length:
        return first
    body = np.empty(length, np.uint8).data  # memory is spent as bytes arrive, whatever was announced
    body[: len(first)] = first
    position = len(first)
    while chunk := await request.content.readany():
        reservation.grow(len(chunk))
        body[position : position + len(chunk)] = chunk
        position += len(chunk)
    if position != length:
        raise invalid(f"the body ended after {position} of its {length} bytes")
    return body


async def _read_growing(request: web.BaseRequest, reservation: Reservation, most_bytes: int, advice: str) -> Buffer:
    body = bytearray()
    while chunk := await request.content.readany():
        if len(body) + len(chunk) > most_bytes:
            raise too_large(f"the body has more than {most_bytes} bytes", most_bytes, advice)
        reservation.grow(len(chunk))
        body += chunk
    return body
