"""The bytes of HTTP/2: frames and header fields as gRPC's answers need them (RFC 9113, RFC 7541). Pure."""

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, REFUSED_STREAM = 0x0, 0x1, 0x3, 0x6, 0x7
COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 0x9, 0xB
SETTING_MAX_STREAMS, SETTING_WINDOW, SETTING_FRAME_SIZE, SETTING_HEADER_LIST = 0x3, 0x4, 0x5, 0x6

DEFAULT_WINDOW_BYTES = 65_535
DEFAULT_FRAME_BYTES = 16_384
MAX_WINDOW_BYTES = 2**31 - 1

FRAME_HEAD = struct.Struct(">HBBBI")


def frame_head(kind: int, flags: int, stream: int, length: int) -> bytes:
    """The nine bytes before a payload."""
    return FRAME_HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A whole frame."""
    return frame_head(kind, flags, stream, len(payload)) + payload


def window_update(stream: int, increment: int) -> bytes:
    """Allow so many more bytes on a stream, or (0) on the connection."""
    return frame(WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


def reset(stream: int, code: int) -> bytes:
    """End a stream."""
    return frame(RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def literal(name: str, value: str) -> bytes:
    """A header field that enters no table: every answer's own, so that the encoder needs no state."""
    return b"\x00" + _string(name) + _string(value)


def _string(text: str) -> bytes:
    encoded = text.encode("utf-8")
    length = len(encoded)
    if length < 0x7F:
        return bytes((length,)) + encoded
    head, length = bytearray(b"\x7f"), length - 0x7F
    while length >= 0x80:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + encoded


def percent_encoded(text: str) -> str:
    """As gRPC writes messages: printable ASCII as it is, the rest and `%` as %XX."""
    if text.isascii() and text.isprintable() and "%" not in text:
        return text
    return "".join(chr(byte) if 0x20 <= byte <= 0x7E and byte != 0x25 else f"%{byte:02X}" for byte in text.encode())
