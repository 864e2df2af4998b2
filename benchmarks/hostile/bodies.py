"""REST bodies: too deep, too large, compressed too well, never ending, and left in the middle."""

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Iterable
from typing import Any

from benchmarks.hostile.door import INFER, Door
from benchmarks.hostile.http1 import GOOD_BODY, TENSOR, asked, with_lines
from benchmarks.hostile.kinds import BAD_REQUEST, ENDED, LEFT, TOO_LARGE, Family
from benchmarks.hostile.wire import ask, connected, head, post

BODIES = Family("REST bodies")
MEBIBYTE = 2**20
LARGE_SECONDS = 30.0
"""A large legal body takes a while on a slow machine."""
SERVED_OR_NOT = TOO_LARGE | {"200", "503", "504"}


def infer(**fields: Any) -> bytes:
    """A request of one tensor with some fields otherwise."""
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2], **fields}
    return json.dumps({"inputs": [tensor]}).encode()


def binary(tensor: bytes, shape: object, datatype: str = "FP32", size: object = None, length: object = None) -> bytes:
    """A request with binary data; its size and its header's length may lie."""
    told = len(tensor) if size is None else size
    entry = {"name": "x", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": told}}
    header = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    said = len(header) if length is None else length
    return post(INFER, header + tensor, f"Inference-Header-Content-Length: {said}")


async def sent(door: Door, *bodies: bytes) -> list[str]:
    """Send each body on a connection of its own."""
    return await asked(door, *(post(INFER, body) for body in bodies))


async def large(door: Door, request: bytes) -> str:
    """Send one large request."""
    return await ask(door.rest, request, patience_seconds=LARGE_SECONDS)


@BODIES.kind("arrays 100,000 deep", BAD_REQUEST | {"413"})
async def deep(door: Door) -> Iterable[str]:
    """Arrays and objects in each other, as data and as the whole body."""
    arrays, objects = b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    within = GOOD_BODY.replace(b"[1,2]}", b"%s}")
    return await sent(
        door, arrays, objects, within % arrays, GOOD_BODY.replace(b'"inputs"', b'"a":%s,"inputs"' % objects)
    )


@BODIES.kind("60 MB of JSON zeros", TOO_LARGE)
async def json_zeros(door: Door) -> Iterable[str]:
    """Two bytes a number on the wire, many times that in memory."""
    count = 30_000_000
    start = b'{"inputs":[{"name":"x","shape":[1,%d],"datatype":"FP32","data":[' % (count + 1)
    return [await large(door, post(INFER, start + b"0," * count + b"0]}]}"))]


@BODIES.kind("a million parameters", TOO_LARGE | {"200", "504"})
async def many_parameters(door: Door) -> Iterable[str]:
    """Of the request, of a tensor, and each a name nobody knows."""
    parameters = {f"p{n}": n for n in range(500_000)}
    return [
        await large(door, post(INFER, infer(parameters=parameters))),
        await large(door, post(INFER, GOOD_BODY[:-1] + b',"parameters":' + json.dumps(parameters).encode() + b"}")),
    ]


@BODIES.kind("BYTES of 16 million zero lengths", TOO_LARGE)
async def zero_lengths(door: Door) -> Iterable[str]:
    """Four bytes an element, each of them nothing; refused for its datatype before it is looked at."""
    return [await large(door, binary(bytes(60_000_000), [15_000_000, 1], "BYTES"))]


@BODIES.kind("gzip bombs", TOO_LARGE | {"415"})
async def bombs(door: Door) -> Iterable[str]:
    """A thousand times larger once unpacked: 64 MiB, and a gibibyte; deflated too."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    zeros = bytes(MEBIBYTE)
    gibibyte = b"".join(packer.compress(zeros) for _ in range(1024)) + packer.flush()
    small = gzip.compress(bytes(63 * MEBIBYTE))
    return [
        await large(door, post(INFER, small, "Content-Encoding: gzip")),
        await large(door, post(INFER, gibibyte, "Content-Encoding: gzip")),
        await large(door, post(INFER, zlib.compress(bytes(63 * MEBIBYTE)), "Content-Encoding: deflate")),
    ]


@BODIES.kind("100,000 tensors or outputs", TOO_LARGE)
async def many_tensors(door: Door) -> Iterable[str]:
    """As inputs of one name, as inputs of names nobody knows, as outputs."""
    same = b'{"inputs":[%s]}' % b",".join([TENSOR] * 20_000)
    other = json.dumps(
        {"inputs": [{"name": f"x{n}", "shape": [0], "datatype": "FP32", "data": []} for n in range(50_000)]}
    )
    outputs = GOOD_BODY[:-1] + b',"outputs":[%s]}' % b",".join(b'{"name":"o%d"}' % n for n in range(100_000))
    return [await large(door, post(INFER, body)) for body in (same, other.encode(), outputs)]


@BODIES.kind("a million rows", TOO_LARGE)
async def many_rows(door: Door) -> Iterable[str]:
    """More than a queue holds, in one request."""
    return [await large(door, binary(bytes(4_000_000), [1_000_000, 1]))]


@BODIES.kind("the largest legal requests", SERVED_OR_NOT)
async def largest(door: Door) -> Iterable[str]:
    """As much binary data as may be; as many bytes of JSON."""
    values = (door.payload_bytes - 1024) // 4
    count = door.payload_bytes // 2 - 1024
    start = b'{"inputs":[{"name":"x","shape":[1,%d],"datatype":"FP32","data":[' % (count + 1)
    return [
        await large(door, binary(bytes(values * 4), [1, values])),
        await large(door, post(INFER, start + b"7," * count + b"7]}]}")),
    ]


@BODIES.kind("eight of the largest at once", SERVED_OR_NOT)
async def largest_together(door: Door) -> Iterable[str]:
    """More than the memory there is, in requests that are legal one by one."""
    values = (door.payload_bytes - 1024) // 4
    request = binary(bytes(4 * values), [1, values])
    return await asyncio.gather(*(large(door, request) for _ in range(8)))


@BODIES.kind("a body that never ends", TOO_LARGE | {"408"})
async def endless(door: Door) -> Iterable[str]:
    """Chunks until somebody says stop; at most 512 MiB."""
    async with connected(door.rest) as wire:
        await wire.send(head("POST", INFER, "Transfer-Encoding: chunked"))
        chunk = b"100000\r\n" + b" " * MEBIBYTE + b"\r\n"
        for _ in range(512):
            if wire.received or not await wire.send(chunk):
                break
        await wire.until(lambda: bool(wire.received))
        return [bytes(wire.received[9:12]).decode() or ("cut" if wire.closed else "nothing")]


@BODIES.kind("callers that leave", {LEFT})
async def leaving(door: Door) -> Iterable[str]:
    """Two hundred that send a request and do not wait, half of them with a TCP reset."""
    async for n in _paced(200, 0.005):
        async with connected(door.rest) as wire:
            await wire.send(with_lines())
            wire.close(abruptly=bool(n % 2))
    return [LEFT]


@BODIES.kind("callers that reset in the middle of an answer", {LEFT} | ENDED)
async def resetting(door: Door) -> Iterable[str]:
    """Once the first bytes of a large answer have come."""
    request = binary(bytes(4 * MEBIBYTE), [1, MEBIBYTE])
    for _ in range(10):
        async with connected(door.rest) as wire:
            await wire.send(request)
            await wire.until(lambda: bool(wire.received))
            wire.close(abruptly=True)
    return [LEFT]


async def _paced(times: int, seconds: float) -> AsyncIterator[int]:
    for n in range(times):
        yield n
        await asyncio.sleep(seconds)
