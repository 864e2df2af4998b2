"""Raw HTTP/1.1: paths, methods, versions, other protocols, and headers that a proxy would believe."""

import ssl
from collections.abc import Iterable

from benchmarks.hostile.door import INFER, Door
from benchmarks.hostile.http1 import GOOD, GOOD_BODY, MEGABYTE, asked, with_lines
from benchmarks.hostile.kinds import BAD_REQUEST, ENDED, HTTP2, TOO_LARGE, Family
from benchmarks.hostile.wire import ask, head, post

ADDRESSES = Family("HTTP/1.1 addresses")


@ADDRESSES.kind("a path of a megabyte", TOO_LARGE | {"404"})
async def long_path(door: Door) -> Iterable[str]:
    """And a query of as much."""
    long = "a" * MEGABYTE
    return await asked(door, head("GET", f"/v2/models/{long}/ready"), head("GET", f"/v2/health/live?{long}"))


@ADDRESSES.kind("path tricks", BAD_REQUEST | {"404", "405", "301", "307", "403"})
async def paths(door: Door) -> Iterable[str]:
    """Ways round what a prefix allows, and what would forge a line of a log."""
    tricks = ["/v2/../metrics", "/v2/%2e%2e/metrics", "/v2/models/..%2f..%2fmetrics", "/v2/models/x%0d%0aevil/infer"]
    tricks += ["/v2/models/x%00/infer", "//metrics", "/v2//..//metrics", "/\\metrics", "/v2/models/%ff%fe/infer"]
    tricks += ["/metrics/", "/v2/..;/metrics", "/%6detrics", "/./metrics", "metrics", "*"]
    return await asked(door, *(head("GET", path) for path in tricks), post(tricks[3], GOOD_BODY))


@ADDRESSES.kind("administrators' paths from the data door", ENDED | {"401", "403", "404", "405", HTTP2})
async def admin_paths(door: Door) -> Iterable[str]:
    """Metrics, state and load are nobody's business here; nor are Envoy's own."""
    paths = ["/metrics", "/trimtab/v1/state", "/trimtab/v1/arrivals", "/readyz"]
    paths += ["/stats", "/config_dump", "/quitquitquit", "/server_info"]
    return [await ask(port, head("GET", path)) for port in (door.rest, door.grpc) for path in paths]


@ADDRESSES.kind("absolute addresses", BAD_REQUEST | {"200", "403", "404", "421"})
async def absolute(door: Door) -> Iterable[str]:
    """As one asks a proxy; nothing is fetched from elsewhere."""
    return await asked(
        door, head("GET", "http://evil.example/v2/health/live"), head("GET", "http://user:pw@127.0.0.1:1/metrics")
    )


@ADDRESSES.kind("methods nobody serves", BAD_REQUEST | {"403", "404", "405", "501"})
async def methods(door: Door) -> Iterable[str]:
    """TRACE, CONNECT, invented ones and no word at all."""
    names = ("TRACE", "BREW", "DELETE", "PATCH", "PUT", "OPTIONS", "G" * 5000, "G\x00T", "")
    return [*await asked(door, *(head(name, INFER) for name in names)), await ask(door.rest, head("CONNECT", "a:1"))]


@ADDRESSES.kind("HTTP/0.9, 1.0, 9.9", BAD_REQUEST | {"200", "404", "426", "505", "408"})
async def versions(door: Door) -> Iterable[str]:
    """Versions of other times."""
    asking = [b"GET /v2/health/live\r\n\r\n", b"GET /v2/health/live HTTP/1.0\r\n\r\n"]
    asking += [b"GET /v2/health/live HTTP/9.9\r\nHost: x\r\n\r\n", b"GET /v2/health/live HTTP/1.1.1\r\nHost: x\r\n\r\n"]
    return await asked(door, *asking)


@ADDRESSES.kind("wrong protocols at each port", BAD_REQUEST | {"200", "404", "415", "426", HTTP2})
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


@ADDRESSES.kind("upgrades", BAD_REQUEST | {"200", "403", "404", "405", "426", "501"})
async def upgrades(door: Door) -> Iterable[str]:
    """To a websocket and to HTTP/2: never taken."""
    socket = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: YQ==")
    h2c = ("Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABkAAQAAP__")
    return await asked(door, head("GET", INFER, *socket), with_lines(*h2c))


@ADDRESSES.kind("headers that a proxy would believe", {"200"})
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


@ADDRESSES.kind("wrong content types", BAD_REQUEST | {"200", "415"})
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
