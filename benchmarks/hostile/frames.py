"""HTTP/2 as bytes, right or wrong as the caller wishes (RFC 9113, RFC 7541)."""

import struct
from collections.abc import Iterable, Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, _, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED = 0x1, 0x1, 0x4, 0x8
WINDOW_SETTING = 0x4
ERRORS = (
    *("NO_ERROR", "PROTOCOL_ERROR", "INTERNAL_ERROR", "FLOW_CONTROL_ERROR", "SETTINGS_TIMEOUT", "STREAM_CLOSED"),
    *("FRAME_SIZE_ERROR", "REFUSED_STREAM", "CANCEL", "COMPRESSION_ERROR", "CONNECT_ERROR", "ENHANCE_YOUR_CALM"),
    *("INADEQUATE_SECURITY", "HTTP_1_1_REQUIRED"),
)
HEAD_BYTES, LARGEST_FRAME_BYTES, FIRST_WINDOW_BYTES = 9, 16_384, 65_535
_HEAD = struct.Struct(">HBBBI")

Fields = Iterable[tuple[bytes, bytes]]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"", length: int | None = None) -> bytes:
    """A frame; `length` lets its head lie."""
    size = len(payload) if length is None else length
    return _HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def settings(*pairs: tuple[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", number, value) for number, value in pairs))


def window_update(stream: int, increment: int) -> bytes:
    """Room for so many more bytes."""
    return frame(WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


def reset(stream: int, code: int = ERRORS.index("CANCEL")) -> bytes:
    """The end of a stream."""
    return frame(RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def error_name(code: int) -> str:
    """The name of an error code."""
    return ERRORS[code] if code < len(ERRORS) else f"{code:#x}"


def block(fields: Fields) -> bytes:
    """A header block of literals that enter no table: any bytes can be a name or a value."""
    return b"".join(b"\x00" + _string(name) + _string(value) for name, value in fields)


def added(name: bytes, value: bytes) -> bytes:
    """A literal that enters the dynamic table, as its newest entry (index 62)."""
    return b"\x40" + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    return _integer(len(text), 7, 0) + text


def _integer(value: int, prefix_bits: int, mask: int) -> bytes:
    most = (1 << prefix_bits) - 1
    if value < most:
        return bytes((mask | value,))
    written, value = bytearray((mask | most,)), value - most
    while value >= 0x80:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def headers(stream: int, header_block: bytes, flags: int = END_HEADERS) -> bytes:
    """HEADERS, and CONTINUATION for what does not fit into one frame."""
    pieces = [
        header_block[at : at + LARGEST_FRAME_BYTES] for at in range(0, max(len(header_block), 1), LARGEST_FRAME_BYTES)
    ]
    first, *rest = pieces
    if not rest:
        return frame(HEADERS, flags, stream, first)
    frames = [frame(HEADERS, flags & ~END_HEADERS, stream, first)]
    frames += [frame(CONTINUATION, 0, stream, piece) for piece in rest[:-1]]
    return b"".join([*frames, frame(CONTINUATION, END_HEADERS, stream, rest[-1])])


def parsed(received: bytearray) -> Iterator[tuple[int, int, int, bytes]]:
    """Take the whole frames off the front: kind, flags, stream, payload."""
    while len(received) >= HEAD_BYTES:
        high, low, kind, flags, stream = _HEAD.unpack_from(received)
        end = HEAD_BYTES + (high << 8 | low)
        if len(received) < end:
            return
        payload = bytes(received[HEAD_BYTES:end])
        del received[:end]
        yield kind, flags, stream & 0x7FFFFFFF, payload


def message(body: bytes, *, flag: int = 0, length: int | None = None) -> bytes:
    """A gRPC message with its prefix, which may lie."""
    return bytes((flag,)) + (len(body) if length is None else length).to_bytes(4, "big") + body
