"""gRPC messages: prefixes that lie, compressed bombs, the largest there are, and calls that are cancelled."""

import asyncio
import gzip
import zlib
from collections.abc import Iterable
from typing import Any

from benchmarks.hostile import frames
from benchmarks.hostile.caller import INFER_PATH, call_fields, calling
from benchmarks.hostile.door import MODEL, Door
from benchmarks.hostile.fields import called, good_message
from benchmarks.hostile.http1 import PATIENT_SECONDS
from benchmarks.hostile.kinds import BROKEN, ENDED, LEFT, TOO_MUCH, Family
from benchmarks.hostile.wire import CUT_WITHIN_SECONDS, together
from trimtab_protocol.grpc_messages import request_class

MESSAGES = Family("gRPC messages")
MEBIBYTE = 2**20
UNIMPLEMENTED = ENDED | {"UNIMPLEMENTED"}
SERVED_OR_NOT = TOO_MUCH | {"OK", "UNAVAILABLE", "DEADLINE_EXCEEDED"}


def a_message(*, raw: bytes | None = b"\0" * 8, **fields: Any) -> Any:
    """A ModelInferRequest of one tensor, some of its fields otherwise."""
    request = request_class("ModelInfer")(model_name=MODEL)
    request.parameters["timeout"].int64_param = int(1e6 * PATIENT_SECONDS)
    request.inputs.add(**{"name": "x", "datatype": "FP32", "shape": [1, 2], **fields})
    if raw is not None:
        request.raw_input_contents.append(raw)
    return request


async def sent(door: Door, *bodies: bytes, fields: Iterable[tuple[bytes, bytes]] | None = None) -> list[str]:
    """Call ModelInfer with each framed body."""
    known = call_fields() if fields is None else list(fields)
    return await called_each(door, known, bodies)


async def called_each(door: Door, fields: Iterable[tuple[bytes, bytes]], bodies: Iterable[bytes]) -> list[str]:
    """Call with each body, each on a connection of its own."""
    return [code for body in bodies for code in await called(door, fields, body=body)]


async def serialized(door: Door, *messages: Any) -> list[str]:
    """Call with each message."""
    return await sent(door, *(frames.message(message.SerializeToString()) for message in messages))


@MESSAGES.kind("methods and services that are not there", UNIMPLEMENTED)
async def unknown_methods(door: Door) -> Iterable[str]:
    """Unknown ones, streams, no path at all: said at once."""
    service = b"/inference.GRPCInferenceService/"
    paths = (service + b"ModelStreamInfer", service + b"RepositoryIndex", b"/evil.Service/Do", b"/", b"/a/b/c", service)
    return await called(door, *(call_fields(path) for path in paths), call_fields(b"/" + b"a" * 5000))


@MESSAGES.kind(
    "streams on health, reflection and unknown methods", UNIMPLEMENTED | {"OK", "INVALID_ARGUMENT", "NOT_FOUND"}
)
async def open_streams(door: Door) -> Iterable[str]:
    """A stream that stays open is told at once where the method is not there."""
    codes = []
    paths = (b"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", b"/grpc.health.v1.Health/Check")
    for path in (*paths, b"/inference.GRPCInferenceService/ModelStreamInfer"):
        async with calling(door.grpc) as caller:
            number = caller.stream()
            await caller.send(frames.headers(number, frames.block(call_fields(path))))
            await caller.send_data(number, frames.message(b""), ends=path in paths)
            codes.append(await caller.end_of(number))
    return codes


@MESSAGES.kind("no message, two, or many", BROKEN)
async def many_messages(door: Door) -> Iterable[str]:
    """A unary call carries one."""
    good = good_message()
    codes = await sent(door, b"", good * 2, good * 1000, good + b"\0")
    async with calling(door.grpc) as caller:
        block = frames.block(call_fields())
        await caller.send(frames.headers(1, block, frames.END_HEADERS | frames.END_STREAM))
        return [*codes, await caller.end_of(1)]


@MESSAGES.kind("prefixes that lie", BROKEN | {"RESOURCE_EXHAUSTED"})
async def prefixes(door: Door) -> Iterable[str]:
    """Lengths too long, too short, of 4 GiB; flags nobody knows; half a prefix."""
    body = good_message()[5:]
    lengths = (len(body) + 1, len(body) - 1, 0, 2**32 - 1, 2**26)
    odd = [frames.message(body, length=length) for length in lengths]
    return await sent(door, *odd, frames.message(body, flag=7), frames.message(body, flag=255), b"\0", b"\0\0\0\0")


@MESSAGES.kind("compressed so that nobody can read it", BROKEN)
async def encodings(door: Door) -> Iterable[str]:
    """Unknown encodings, none named, gzip that is none, gzip cut short."""
    body = good_message()[5:]
    packed = gzip.compress(body)
    codes = await sent(door, frames.message(body, flag=1))
    for encoding, data in (
        (b"snappy", body),
        (b"zstd", body),
        (b"gzip", body),
        (b"gzip", packed[:-9]),
        (b"\xff", packed),
    ):
        fields = call_fields(INFER_PATH, (b"grpc-encoding", encoding))
        codes += await sent(door, frames.message(data, flag=1), fields=fields)
    return codes


@MESSAGES.kind("gzip bombs in messages", TOO_MUCH)
async def bombs(door: Door) -> Iterable[str]:
    """64 MiB and a gibibyte, a thousand times smaller on the wire."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    zeros = bytes(MEBIBYTE)
    gibibyte = b"".join(packer.compress(zeros) for _ in range(1024)) + packer.flush()
    fields = call_fields(INFER_PATH, (b"grpc-encoding", b"gzip"))
    small = gzip.compress(bytes(63 * MEBIBYTE))
    return await sent(door, frames.message(small, flag=1), frames.message(gibibyte, flag=1), fields=fields)


@MESSAGES.kind("the largest legal message", SERVED_OR_NOT)
async def largest(door: Door) -> Iterable[str]:
    """As many raw contents as may be, and as many bytes of typed ones."""
    numbers = (door.payload_bytes - 1024) // 4
    typed = a_message(raw=None, shape=[1, numbers - 99], contents={"fp32_contents": [1.0] * (numbers - 99)})
    return await serialized(door, a_message(shape=[1, numbers], raw=bytes(4 * numbers)), typed)


@MESSAGES.kind("eight of the largest messages at once", SERVED_OR_NOT)
async def largest_together(door: Door) -> Iterable[str]:
    """On connections of their own."""
    numbers = (door.payload_bytes - 1024) // 4
    body = frames.message(a_message(shape=[1, numbers], raw=bytes(4 * numbers)).SerializeToString())
    return await together(*(sent(door, body) for _ in range(8)))


@MESSAGES.kind("a message that never ends", TOO_MUCH | {"DEADLINE_EXCEEDED"})
async def endless(door: Door) -> Iterable[str]:
    """Announced as 4 GiB and as 1 byte; at most 128 MiB are sent."""
    codes = []
    for length in (2**32 - 1, 1):
        async with calling(door.grpc) as caller:
            number = caller.stream()
            await caller.send(frames.headers(number, frames.block(call_fields())))
            await caller.send_data(number, frames.message(b"", length=length))
            for _ in range(128):
                if not await caller.send_data(number, bytes(MEBIBYTE)):
                    break
            codes.append(await caller.end_of(number, CUT_WITHIN_SECONDS))
    return codes


@MESSAGES.kind("callers that cancel", {LEFT})
async def cancelling(door: Door) -> Iterable[str]:
    """Three hundred calls, each reset at some point of its life."""
    async with calling(door.grpc) as caller:
        for turn in range(300):
            number = caller.stream()
            await caller.send(frames.headers(number, frames.block(call_fields())))
            await caller.send_data(number, good_message(), ends=True)
            await asyncio.sleep(0.001 * (turn % 8))
            await caller.send(frames.reset(number))
    return [LEFT]
