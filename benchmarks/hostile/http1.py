"""Raw HTTP/1.1: heads, framing, paths and methods that no client library sends."""

import asyncio
import ssl
from collections.abc import Iterable

from benchmarks.hostile.door import INFER, Door
from benchmarks.hostile.kinds import BAD_REQUEST, ENDED, HTTP2, TOO_LARGE, Family
from benchmarks.hostile.wire import ask, connected, head, post, reply

HTTP1 = Family("http/1.1")
GOOD_BODY = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}'
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


@HTTP1.kind("NUL and CR in header values", BAD_REQUEST)
async def control_characters(door: Door) -> Iterable[str]:
    """In each header that goes on to a replica."""
    names = ("x-request-id", "traceparent", "tracestate", "user-agent")
    return await asked(door, *(with_lines(f"{name}: a{odd}b") for name in names for odd in ("\0", "\rx: y\r")))


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


@HTTP1.kind("a path of a megabyte", TOO_LARGE | {"404"})
async def long_path(door: Door) -> Iterable[str]:
    """And a query of as much."""
    long = "a" * MEGABYTE
    return await asked(door, head("GET", f"/v2/models/{long}/ready"), head("GET", f"/v2/health/live?{long}"))


@HTTP1.kind("path tricks", BAD_REQUEST | {"404", "405", "301", "307", "403"})
async def paths(door: Door) -> Iterable[str]:
    """Ways round what a prefix allows, and what would forge a line of a log."""
    tricks = ["/v2/../metrics", "/v2/%2e%2e/metrics", "/v2/models/..%2f..%2fmetrics", "/v2/models/x%0d%0aevil/infer"]
    tricks += ["/v2/models/x%00/infer", "//metrics", "/v2//..//metrics", "/\\metrics", "/v2/models/%ff%fe/infer"]
    tricks += ["/metrics/", "/v2/..;/metrics", "/%6detrics", "/./metrics", "metrics", "*"]
    return await asked(door, *(head("GET", path) for path in tricks), post(tricks[3], GOOD_BODY))


@HTTP1.kind("administrators' paths from the data door", ENDED | {"401", "403", "404", "405", HTTP2})
async def admin_paths(door: Door) -> Iterable[str]:
    """Metrics, state and load are nobody's business here; nor are Envoy's own."""
    paths = ["/metrics", "/trimtab/v1/state", "/trimtab/v1/load", "/trimtab/v1/welcome"]
    paths += ["/stats", "/config_dump", "/quitquitquit", "/server_info"]
    return [await ask(port, head("GET", path)) for port in (door.rest, door.grpc) for path in paths]


@HTTP1.kind("absolute addresses", BAD_REQUEST | {"200", "403", "404", "421"})
async def absolute(door: Door) -> Iterable[str]:
    """As one asks a proxy; nothing is fetched from elsewhere."""
    return await asked(
        door, head("GET", "http://evil.example/v2/health/live"), head("GET", "http://user:pw@127.0.0.1:1/metrics")
    )


@HTTP1.kind("methods nobody serves", BAD_REQUEST | {"403", "404", "405", "501"})
async def methods(door: Door) -> Iterable[str]:
    """TRACE, CONNECT, invented ones and no word at all."""
    names = ("TRACE", "BREW", "DELETE", "PATCH", "PUT", "OPTIONS", "G" * 5000, "G\x00T", "")
    return [*await asked(door, *(head(name, INFER) for name in names)), await ask(door.rest, head("CONNECT", "a:1"))]


@HTTP1.kind("HTTP/0.9, 1.0, 9.9", BAD_REQUEST | {"200", "404", "426", "505", "408"})
async def versions(door: Door) -> Iterable[str]:
    """Versions of other times."""
    asking = [b"GET /v2/health/live\r\n\r\n", b"GET /v2/health/live HTTP/1.0\r\n\r\n"]
    asking += [b"GET /v2/health/live HTTP/9.9\r\nHost: x\r\n\r\n", b"GET /v2/health/live HTTP/1.1.1\r\nHost: x\r\n\r\n"]
    return await asked(door, *asking)


@HTTP1.kind("wrong protocols at each port", BAD_REQUEST | {"200", "404", "415", "426", HTTP2})
async def wrong_protocols(door: Door) -> Iterable[str]:
    """TLS on a plain port, HTTP/2 where REST is, HTTP/1.1 where gRPC is, and mere noise."""
    incoming, hello = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(incoming, hello, server_hostname="echo")
    try:
        tls.do_handshake()
    except ssl.SSLWantReadError:
        client_hello = hello.read()
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)
    noise = bytes(range(256)) * 64
    asking = [(port, sent) for port in (door.rest, door.grpc) for sent in (client_hello, noise)]
    return [await ask(port, sent) for port, sent in [*asking, (door.rest, preface), (door.grpc, GOOD)]]


@HTTP1.kind("upgrades", BAD_REQUEST | {"200", "403", "404", "405", "426", "501"})
async def upgrades(door: Door) -> Iterable[str]:
    """To a websocket and to HTTP/2: never taken."""
    socket = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: YQ==")
    h2c = ("Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABkAAQAAP__")
    return await asked(door, head("GET", INFER, *socket), with_lines(*h2c))


@HTTP1.kind("headers that a proxy would believe", {"200"})
async def spoofed(door: Door) -> Iterable[str]:
    """Nobody is somebody else, and no inner timeout or retry changes, because a header says so."""
    return await asked(
        door,
        with_lines("x-forwarded-for: 10.0.0.1", "x-real-ip: 10.0.0.1", "forwarded: for=10.0.0.1;proto=https"),
        with_lines("x-trimtab-client: somebody-else", "x-trimtab-reason: none", "x-trimtab-stage: first"),
        with_lines("x-envoy-upstream-rq-timeout-ms: 1", "x-envoy-expected-rq-timeout-ms: 1"),
        with_lines("x-envoy-internal: true", "x-envoy-retry-on: 5xx", "x-envoy-max-retries: 99"),
        with_lines("x-envoy-original-path: /metrics", "x-original-url: /metrics", "x-rewrite-url: /metrics"),
        with_lines("x-http-method-override: DELETE", "x-envoy-decorator-operation: " + "a" * 1000),
    )


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


@HTTP1.kind("wrong content types", BAD_REQUEST | {"200", "415"})
async def content_types(door: Door) -> Iterable[str]:
    """The body is what it is; no parser of forms or XML wakes up."""
    kinds = (
        "text/html",
        "multipart/form-data; boundary=" + "a" * 5000,
        "application/xml",
        "\xff\xfe",
        "application/grpc",
    )
    return await asked(door, *(with_lines(f"Content-Type: {kind}") for kind in kinds))
