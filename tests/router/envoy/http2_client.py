"""Minimal HTTP/2 client that exposes each frame as it arrives."""

import asyncio
import ssl
import struct

import hpack

_DATA, _HEADERS, _SETTINGS, _PING = 0, 1, 4, 6
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4


class H2Caller:
    """One connection, one request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, authority: str) -> None:
        self._reader = reader
        self._writer = writer
        self._authority = authority
        self._scheme = "http" if writer.get_extra_info("ssl_object") is None else "https"
        self._decoder = hpack.Decoder()
        self.ended = False

    @classmethod
    async def connect(cls, port: int, trusts: ssl.SSLContext | None = None) -> "H2Caller":
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusts)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        caller = cls(reader, writer, f"127.0.0.1:{port}")
        caller.send(_SETTINGS, 0, 0)
        return caller

    def send(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        """Write a frame."""
        head = struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream)
        self._writer.write(head + payload)

    def post(self, path: str, body: bytes, *headers: tuple[str, str], ends: bool = True) -> None:
        """Begin the request."""
        pseudo = [(":method", "POST"), (":scheme", self._scheme), (":authority", self._authority), (":path", path)]
        self.send(_HEADERS, _END_HEADERS, 1, hpack.Encoder().encode([*pseudo, *headers]))
        self.send(_DATA, _END_STREAM if ends else 0, 1, body)

    async def headers(self) -> dict[str, str]:
        """The next headers of the answer."""
        return {str(name): str(value) for name, value in self._decoder.decode(await self._next(_HEADERS))}

    async def data(self) -> bytes:
        """The next piece of the answer; empty at its end."""
        return b"" if self.ended else await self._next(_DATA)

    async def _next(self, wanted: int) -> bytes:
        while True:
            head = await self._reader.readexactly(9)
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags = head[3], head[4]
            if kind in {_SETTINGS, _PING} and not flags & _ACK:
                self.send(kind, _ACK, 0, payload if kind == _PING else b"")
            if kind in {_DATA, _HEADERS}:
                self.ended = bool(flags & _END_STREAM)
            if kind == wanted:
                return payload

    def close(self) -> None:
        self._writer.close()
