"""Requests over HTTP/1.1 as bytes, and headers that no client library sends."""

from collections.abc import Iterable

from benchmarks.hostile.door import INFER, Door
from benchmarks.hostile.kinds import BAD_REQUEST, Family
from benchmarks.hostile.wire import ask, post

HTTP1 = Family("HTTP/1.1 headers")
PATIENT_SECONDS = 2.0
"""Timeout of a request that is served."""
TENSOR = b'{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}'
GOOD_BODY = b'{"parameters":{"timeout":%d},"inputs":[%s]}' % (int(1e6 * PATIENT_SECONDS), TENSOR)
GOOD = post(INFER, GOOD_BODY)
MEGABYTE = 2**20


async def asked(door: Door, *requests: bytes) -> list[str]:
    """Send each request on a connection of its own to the REST port."""
    return [await ask(door.rest, request) for request in requests]


def with_lines(*lines: str) -> bytes:
    """Return a valid request with additional header lines."""
    return post(INFER, GOOD_BODY, *lines)


@HTTP1.kind("hop-by-hop headers named for removal", BAD_REQUEST | {"200"})
async def hop_by_hop(door: Door) -> Iterable[str]:
    """`Connection` names headers that must reach the router."""
    return await asked(door, with_lines("Connection: content-length, host, x-request-id, content-type, close"))
