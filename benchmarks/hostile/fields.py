"""HTTP/2 header fields and frames that break the protocol: smuggling above all."""

from collections.abc import Iterable

import numpy as np

from benchmarks.hostile import frames
from benchmarks.hostile.caller import INFER_PATH, Caller, call_fields, calling
from benchmarks.hostile.door import INFER, MODEL, Door
from benchmarks.hostile.http1 import GOOD_BODY, PATIENT_SECONDS
from benchmarks.hostile.kinds import BROKEN, ENDED, KEPT, Family
from benchmarks.hostile.wire import connected
from trimtab_protocol import InferRequest, Tensor
from trimtab_protocol.grpc_messages import request_to_message

FIELDS = Family("HTTP/2 fields and frames")
Field = tuple[bytes, bytes]


def good_message(value: float = 1.0) -> bytes:
    """A right request as one framed gRPC message."""
    x = Tensor.of("x", np.full((1, 2), value, np.float32))
    request = InferRequest(MODEL, (x,), parameters={"timeout": int(1e6 * PATIENT_SECONDS)})
    return frames.message(request_to_message(request).SerializeToString())


async def called(door: Door, *all_fields: Iterable[Field], body: bytes | None = None) -> list[str]:
    """Make a call with each set of fields, each on a connection of its own."""
    codes = []
    for fields in all_fields:
        async with calling(door.grpc) as caller:
            codes.append(await caller.call(good_message() if body is None else body, fields))
    return codes


def instead(name: bytes, *values: bytes) -> list[Field]:
    """The fields of a call with one pseudo-header otherwise, twice, or not at all."""
    fields = [field for field in call_fields() if field[0] != name]
    return [*((name, value) for value in values), *fields]


@FIELDS.kind("CR, LF and NUL in metadata", BROKEN)
async def smuggling(door: Door) -> Iterable[str]:
    """Header lines and whole requests in every value that may go on to a replica."""
    request = b"x\r\n\r\nPOST /v2/models/echo/infer HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (
        len(GOOD_BODY),
        GOOD_BODY,
    )
    names = (b"x-request-id", b"traceparent", b"tracestate", b"user-agent", b"baggage", b"grpc-timeout", b"x-any")
    odd = (b"a\r\nx-evil: 1", b"a\nx-evil: 1", b"a\0b", b"a\rb", request)
    return await called(door, *(call_fields(INFER_PATH, (name, value)) for name in names for value in odd))


@FIELDS.kind("CR, LF and NUL in pseudo-headers", BROKEN | {"405"})
async def smuggling_pseudo(door: Door) -> Iterable[str]:
    """In the path, the host, the method and the scheme."""
    odd = b" HTTP/1.1\r\nx-evil: 1\r\n\r\n"
    names = {b":path": INFER_PATH, b":authority": b"x", b":method": b"POST", b":scheme": b"http"}
    return await called(door, *(instead(n, v + e) for n, v in names.items() for e in (odd, b"\0", b"\n")))


@FIELDS.kind("odd names of fields", BROKEN)
async def names(door: Door) -> Iterable[str]:
    """Upper case, spaces, line ends, colons, nothing, bytes that are no text."""
    odd = (b"X-Request-Id", b"x a", b"x\r\ny", b"x:y", b"", b"\xff", b"x\0", b" x", b":unknown")
    return await called(door, *(call_fields(INFER_PATH, (name, b"1")) for name in odd))


@FIELDS.kind("pseudo-headers missing, twice, or late", BROKEN | {"405", "415"})
async def pseudo(door: Door) -> Iterable[str]:
    """As no HTTP/2 request may be."""
    late = [*call_fields()[1:], (b":method", b"POST")]
    missing = [instead(name) for name in (b":method", b":path", b":scheme")]
    empty = [instead(name, b"") for name in (b":method", b":path")]
    return await called(door, late, *missing, *empty, instead(b":path", INFER_PATH, b"/metrics"), [])


@FIELDS.kind("connection-specific fields", BROKEN)
async def connection_specific(door: Door) -> Iterable[str]:
    """Fields that mean something to HTTP/1.1 alone, and would on the way to a replica."""
    odd = [(b"connection", b"keep-alive"), (b"transfer-encoding", b"chunked"), (b"upgrade", b"websocket")]
    odd += [(b"keep-alive", b"1"), (b"proxy-connection", b"close")]
    return await called(door, *(call_fields(INFER_PATH, field) for field in odd))


@FIELDS.kind("content-length that lies", BROKEN | {"413"})
async def content_length(door: Door) -> Iterable[str]:
    """Fewer, more, negative, no number, twice."""
    odd = ([b"5"], [b"5000"], [b"-1"], [b"x"], [b"5", b"6"])
    return await called(door, *(call_fields(INFER_PATH, *((b"content-length", v) for v in values)) for values in odd))


@FIELDS.kind("odd methods and content types", BROKEN | {"403", "405", "415", "501", "UNAVAILABLE"})
async def methods(door: Door) -> Iterable[str]:
    """GET, CONNECT, invented ones; JSON, gRPC-Web and plain text as content type."""
    kinds = (
        b"application/json",
        b"application/grpc-web",
        b"application/grpc-web-text",
        b"text/plain",
    )
    asked = [instead(b":method", method) for method in (b"GET", b"CONNECT", b"BREW", b"PRI", b"HEAD")]
    return await called(door, *asked, *(call_fields(kind=kind) for kind in kinds))


@FIELDS.kind("fields of 100 kB", BROKEN | {"RESOURCE_EXHAUSTED", "404", "414"})
async def long_fields(door: Door) -> Iterable[str]:
    """Values, names, paths, and ten thousand short ones."""
    long = b"a" * 100_000
    many = [(b"x-%d" % n, b"1") for n in range(10_000)]
    asked = [call_fields(INFER_PATH, (b"x-request-id", long)), call_fields(INFER_PATH, (long, b"1"))]
    return await called(door, *asked, call_fields(b"/" + long), call_fields(INFER_PATH, *many))


@FIELDS.kind("odd metadata", BROKEN | {"OK"})
async def odd_metadata(door: Door) -> Iterable[str]:
    """Bytes beyond ASCII, binary metadata that is none, the same name a hundred times, 8 kB."""
    odd = [[(b"x-request-id", "€".encode())], [(b"x-request-id", b"\xff\xfe")], [(b"x-a-bin", b"*not base64*")]]
    odd += [[(b"x-request-id", b"%d" % n) for n in range(100)], [(b"x-request-id", b"a" * 8000)]]
    return await called(door, *(call_fields(INFER_PATH, *more) for more in odd))


@FIELDS.kind("metadata that a proxy would believe", {"OK"})
async def spoofed(door: Door) -> Iterable[str]:
    """As over REST: served as if it were not there."""
    odd = [
        [(b"x-envoy-upstream-rq-timeout-ms", b"1")],
        [(b"x-forwarded-for", b"10.0.0.1"), (b"x-envoy-internal", b"true")],
    ]
    odd += [
        [(b"x-trimtab-client", b"somebody-else")],
        [(b"x-envoy-retry-grpc-on", b"internal")],
        [(b"grpc-status", b"13")],
    ]
    return await called(door, *(call_fields(INFER_PATH, *more) for more in odd))


async def raw(door: Door, *all_sent: bytes, preface: bytes = frames.PREFACE + frames.settings()) -> list[str]:
    """Send bytes after a hello, each on a connection of its own; return how the stream or the connection ended."""
    codes = []
    for sent in all_sent:
        async with connected(door.grpc) as wire:
            caller = Caller(wire)
            await caller.send(preface + sent)
            end = await caller.end()
            codes.append(caller.outcome.get(1, end) if end == KEPT else end)
    return codes


OPEN = frames.headers(1, frames.block(call_fields()))
WHOLE = OPEN + frames.frame(frames.DATA, frames.END_STREAM, 1, good_message())


@FIELDS.kind("frames after the end, or before the beginning", BROKEN)
async def out_of_turn(door: Door) -> Iterable[str]:
    """DATA and HEADERS on streams that ended or never began, numbers that are even."""
    return await raw(
        door,
        OPEN
        + frames.frame(frames.DATA, frames.END_STREAM, 1, good_message()[:-1])
        + frames.frame(frames.DATA, 0, 1, b"x"),
        WHOLE + frames.frame(frames.DATA, 0, 1, b"x" * 100) + frames.frame(frames.DATA, frames.END_STREAM, 1, b"x"),
        frames.frame(frames.DATA, 0, 7, b"x"),
        frames.headers(2, frames.block(call_fields())),
        frames.headers(0, frames.block(call_fields())),
        frames.frame(frames.CONTINUATION, frames.END_HEADERS, 1, b""),
        frames.frame(frames.HEADERS, 0, 1, frames.block(call_fields())) + frames.frame(frames.PING, 0, 0, bytes(8)),
        OPEN + frames.headers(1, frames.block(call_fields())),
    )


@FIELDS.kind("frames of wrong sizes and values", ENDED)
async def wrong_frames(door: Door) -> Iterable[str]:
    """Too large, too short, padded beyond their end, settings and windows out of range, pushes."""
    return await raw(
        door,
        frames.frame(frames.DATA, 0, 1, length=2**24 - 1),
        frames.frame(frames.HEADERS, frames.END_HEADERS, 1, bytes(2**20)),
        frames.frame(frames.PING, 0, 0, b"short"),
        frames.frame(frames.SETTINGS, 0, 0, b"short"),
        frames.settings((frames.WINDOW_SETTING, 2**31)),
        frames.settings((frames.FRAME_SIZE_SETTING, 1)),
        frames.settings((2, 7)),
        frames.frame(frames.SETTINGS, frames.ACK, 0, b"123456"),
        frames.window_update(0, 0),
        frames.window_update(0, 2**31 - 1),
        frames.frame(frames.PUSH_PROMISE, frames.END_HEADERS, 1, bytes(4)),
        frames.frame(frames.RST_STREAM, 0, 0, bytes(4)),
        OPEN + frames.frame(frames.DATA, frames.PADDED, 1, b"\xffx"),
    )


@FIELDS.kind("frames that may be passed over", BROKEN | {KEPT})
async def passed_over(door: Door) -> Iterable[str]:
    """Numbers that go back, a priority of no stream: an end by the book, harmless where nobody heeds them."""
    back = frames.headers(9, frames.block(call_fields())) + frames.headers(3, frames.block(call_fields()))
    return await raw(door, back, frames.frame(frames.PRIORITY, 0, 0, bytes(5)))


@FIELDS.kind("wrong hellos", ENDED | {"400", "nothing"})
async def hellos(door: Door) -> Iterable[str]:
    """Another preface, no SETTINGS first, frames in reverse."""
    begun = frames.settings()
    return [
        *await raw(door, b"", preface=frames.PREFACE.replace(b"SM", b"XX") + begun),
        *await raw(door, WHOLE, preface=frames.PREFACE),
        *await raw(door, frames.PREFACE, preface=begun),
        *await raw(door, frames.PREFACE),
    ]


@FIELDS.kind("REST over HTTP/2 with smuggled framing", BROKEN | {"405", "413", "415"})
async def rest_over_http2(door: Door) -> Iterable[str]:
    """What is right in HTTP/2 and would be another request once written as HTTP/1.1."""
    pseudo = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", INFER.encode()), (b":authority", b"x")]
    odd = (
        (b"transfer-encoding", b"chunked"),
        (b"content-length", b"1"),
        (b"x-a", b"b\r\n\r\nGET /metrics HTTP/1.1\r\n"),
    )
    return await called(door, *([*pseudo, field] for field in odd), body=GOOD_BODY)
