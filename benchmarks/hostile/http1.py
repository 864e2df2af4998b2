"""Raw HTTP/1.1: heads and framing that no client library sends."""

import asyncio
from collections.abc import Iterable

from benchmarks.hostile.door import INFER, Door
from benchmarks.hostile.kinds import BAD_REQUEST, ENDED, TOO_LARGE, Family
from benchmarks.hostile.wire import ask, connected, head, post, reply

HTTP1 = Family("http/1.1")
PATIENT_SECONDS = 2.0
"""What those may wait who ought to be served: a machine that stops for a second is nobody's fault."""
TENSOR = b'{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}'
GOOD_BODY = b'{"parameters":{"timeout":%d},"inputs":[%s]}' % (int(1e6 * PATIENT_SECONDS), TENSOR)
GOOD = post(INFER, GOOD_BODY)
LENGTH = f"Content-Length: {len(GOOD_BODY)}"
CHUNKED = "Transfer-Encoding: chunked"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD_BODY), GOOD_BODY)
SMUGGLED = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
MEGABYTE = 2**20


async def asked(door: Door, *requests: bytes) -> list[str]:
    """Send each on a connection of its own to the REST port."""
    return [await ask(door.rest, request) for request in requests]


def with_lines(*lines: str) -> bytes:
    """A good request with these header lines too."""
    return post(INFER, GOOD_BODY, *lines)


@HTTP1.kind("two Content-Lengths", BAD_REQUEST)
async def two_lengths(door: Door) -> Iterable[str]:
    """As smugglers send where two servers each believe another one."""
    return await asked(
        door,
        head("POST", INFER, LENGTH, "Content-Length: 5") + GOOD_BODY + SMUGGLED,
        head("POST", INFER, f"{LENGTH}, 5") + GOOD_BODY + SMUGGLED,
    )


@HTTP1.kind("Content-Length with chunks", BAD_REQUEST | {"501"})
async def length_and_chunks(door: Door) -> Iterable[str]:
    """Both at once, in either order and in odd spellings."""
    return await asked(
        door,
        head("POST", INFER, "Content-Length: 4", CHUNKED) + CHUNKS + SMUGGLED,
        head("POST", INFER, CHUNKED, "Content-Length: 4") + CHUNKS + SMUGGLED,
        head("POST", INFER, "Content-Length: 4", "Transfer-Encoding: xchunked") + CHUNKS + SMUGGLED,
        head("POST", INFER, "Transfer-Encoding: chunked, identity") + CHUNKS + SMUGGLED,
        head("POST", INFER, "Transfer-Encoding:\x0bchunked", "Content-Length: 4") + CHUNKS + SMUGGLED,
    )


@HTTP1.kind("lengths that are no numbers", BAD_REQUEST)
async def odd_lengths(door: Door) -> Iterable[str]:
    """Signs, spaces, hexadecimal, and more than any integer holds."""
    odd = ("-1", "+70", "0x46", "7_0", "7 0", "1e2", "9" * 40, "70;", "")
    return await asked(door, *(head("POST", INFER, f"Content-Length: {value}") + GOOD_BODY for value in odd))


@HTTP1.kind("chunk sizes that lie", BAD_REQUEST | {"413"})
async def odd_chunks(door: Door) -> Iterable[str]:
    """Chunk sizes that overflow, are negative, are no numbers, or do not fit the chunk."""
    begin = head("POST", INFER, CHUNKED)
    sizes = (b"ffffffffffffffffff", b"-1", b"0x46", b"g", b"1", b"")
    return await asked(door, *(begin + size + b"\r\n" + GOOD_BODY + b"\r\n0\r\n\r\n" for size in sizes))


@HTTP1.kind("chunk extensions of a megabyte", TOO_LARGE)
async def chunk_extensions(door: Door) -> Iterable[str]:
    """What nobody reads, in front of one byte."""
    return await asked(door, head("POST", INFER, CHUNKED) + b"1;" + b"a" * MEGABYTE + b"\r\n{\r\n0\r\n\r\n")


@HTTP1.kind("200,000 chunks of one byte", ENDED | {"200", "400", "413", "429", "408"})
async def tiny_chunks(door: Door) -> Iterable[str]:
    """Legal and dear."""
    return await asked(door, head("POST", INFER, CHUNKED) + b"1\r\n \r\n" * 200_000 + CHUNKS)


@HTTP1.kind("trailers that smuggle", BAD_REQUEST | {"200"})
async def trailers(door: Door) -> Iterable[str]:
    """Framing and spoofed fields after the last chunk, where only metadata may stand."""
    end = CHUNKS[:-2] + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\nx-request-id: a\x00b\r\n\r\n"
    plain = CHUNKS[:-2] + b"Content-Length: 5\r\nHost: evil\r\n\r\n"
    return await asked(door, head("POST", INFER, CHUNKED) + end, head("POST", INFER, CHUNKED) + plain)


PASSED_ON = ("x-request-id", "traceparent", "tracestate", "user-agent")
"""Headers that go on to a replica, or once did."""


@HTTP1.kind("NUL in header values", BAD_REQUEST)
async def null_characters(door: Door) -> Iterable[str]:
    """In each header that goes on to a replica."""
    return await asked(door, *(with_lines(f"{name}: a\0b") for name in PASSED_ON))


@HTTP1.kind("CR alone in header values", BAD_REQUEST | {"200"})
async def bare_returns(door: Door) -> Iterable[str]:
    """Refused, or a space put in its place (RFC 9110, 5.5)."""
    return await asked(door, *(with_lines(f"{name}: a\rx: y\rb") for name in PASSED_ON))


@HTTP1.kind("odd header names", BAD_REQUEST)
async def odd_names(door: Door) -> Iterable[str]:
    """Spaces before the colon, no name, no colon, control characters."""
    return await asked(door, *map(with_lines, ("x-a : 1", ": 1", "no colon", "x\0a: 1", "x\x7fa: 1", "x(a): 1")))


@HTTP1.kind("folded headers", BAD_REQUEST | {"200"})
async def folded(door: Door) -> Iterable[str]:
    """A value over two lines, abolished since 2014."""
    return await asked(door, with_lines("x-request-id: a", " x-evil: b"), with_lines("x-request-id: a", "\tb"))


@HTTP1.kind("line feeds alone", BAD_REQUEST | {"200"})
async def bare_line_feeds(door: Door) -> Iterable[str]:
    """Lines that end without a carriage return."""
    return await asked(door, GOOD.replace(b"\r\n", b"\n"), with_lines("x-a: 1\nx-b: 2"))


@HTTP1.kind("no Host, two Hosts", BAD_REQUEST | {"200"})
async def hosts(door: Door) -> Iterable[str]:
    """Which of them is meant? Nothing here goes by it, so being served does no harm."""
    without = f"POST {INFER} HTTP/1.1\r\n{LENGTH}\r\n\r\n".encode() + GOOD_BODY
    return await asked(door, without, with_lines("Host: elsewhere"))


@HTTP1.kind("a header of a megabyte", TOO_LARGE)
async def long_header(door: Door) -> Iterable[str]:
    """One value longer than any head may be; and one that goes on to a replica."""
    return await asked(door, with_lines("x-a: " + "a" * MEGABYTE), with_lines("x-request-id: " + "a" * 100_000))


@HTTP1.kind("20,000 headers", TOO_LARGE)
async def many_headers(door: Door) -> Iterable[str]:
    """Short ones."""
    return await asked(door, with_lines(*(f"x-{n}: 1" for n in range(20_000))))


@HTTP1.kind("hop-by-hop headers named for removal", BAD_REQUEST | {"200"})
async def hop_by_hop(door: Door) -> Iterable[str]:
    """`Connection` names headers that must reach the router."""
    return await asked(door, with_lines("Connection: content-length, host, x-request-id, content-type, close"))


@HTTP1.kind("expectations", BAD_REQUEST | {"200", "417"})
async def expectations(door: Door) -> Iterable[str]:
    """One that is known, with its body sent at once, and one that is not."""
    return await asked(door, with_lines("Expect: 100-continue"), with_lines("Expect: a-miracle"))


@HTTP1.kind("2,000 requests in one go", ENDED | {"200", "429"})
async def pipelined(door: Door) -> Iterable[str]:
    """Pipelined on one connection; each answered, or the connection cut."""
    async with connected(door.rest) as wire:
        sending = asyncio.create_task(wire.send(head("GET", "/v2/health/live") * 2000))
        codes: list[str] = []
        while len(codes) < 2000 and (not codes or codes[-1].isdigit()):
            codes.append(await reply(wire))
            await wire.until(lambda: False, 0.0)
            _drop_body(wire.received)
        sending.cancel()
        return codes


def _drop_body(received: bytearray) -> None:
    """Leave what begins with the next answer."""
    at = received.find(b"HTTP/1.1")
    del received[: at if at >= 0 else len(received)]


@HTTP1.kind("bodies longer or shorter than they say", BAD_REQUEST | {"200", "404", "405"})
async def body_and_length(door: Door) -> Iterable[str]:
    """What follows a body is the next request or nothing; a body that ends early is none."""
    more = GOOD + b"and more that is no request\r\n\r\n"
    fewer = head("POST", INFER, "Content-Length: 5000") + GOOD_BODY
    return [*await asked(door, more), await ask(door.rest, fewer, ends=True)]


@HTTP1.kind("a megabyte of empty lines", BAD_REQUEST | {"200", "408", "431"})
async def empty_lines(door: Door) -> Iterable[str]:
    """Before a request, where a server may skip some."""
    return await asked(door, b"\r\n" * (MEGABYTE // 2) + GOOD, b"\n" * MEGABYTE + GOOD)
