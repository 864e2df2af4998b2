"""gRPC messages: prefixes that lie, compressed bombs, protobufs that are none or too much."""

import asyncio
import gzip
import zlib
from collections.abc import Iterable
from typing import Any

from benchmarks.hostile import frames
from benchmarks.hostile.caller import INFER_PATH, call_fields, calling
from benchmarks.hostile.door import MODEL, Door
from benchmarks.hostile.fields import called, good_message
from benchmarks.hostile.kinds import BROKEN, ENDED, INVALID, LEFT, TOO_MUCH, Family
from benchmarks.hostile.wire import CUT_WITHIN_SECONDS, together
from trimtab_protocol.grpc_messages import request_class

MESSAGES = Family("gRPC messages")
MEBIBYTE = 2**20
UNIMPLEMENTED = ENDED | {"UNIMPLEMENTED"}
SERVED_OR_NOT = TOO_MUCH | {"OK", "UNAVAILABLE", "DEADLINE_EXCEEDED"}


def a_message(*, raw: bytes | None = b"\0" * 8, **fields: Any) -> Any:
    """A ModelInferRequest of one tensor, some of its fields otherwise."""
    request = request_class("ModelInfer")(model_name=MODEL)
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


@MESSAGES.kind("messages that are no protobuf", INVALID)
async def no_protobuf(door: Door) -> Iterable[str]:
    """Noise, cut short, groups 100,000 deep, text that is no UTF-8, lengths beyond the end."""
    good = a_message().SerializeToString()
    odd = (
        b"\xff" * 100,
        good[:-3],
        b"\x0b" * 100_000,
        b"\x0a\x02\xff\xfe" + good,
        b"\x0a\xff\xff\xff\xff\x0f",
        bytes(range(256)),
    )
    return await sent(door, *map(frames.message, odd))


@MESSAGES.kind("shapes and contents that lie", INVALID)
async def shapes(door: Door) -> Iterable[str]:
    """Products that overflow, negative and thousands of dimensions, contents of another size, type or number."""
    odd: list[list[int]] = [[2**62, 4], [2**32, 2**32], [-1, -2], [0, 2], [1] * 10_000, [], [1, 3], [2**63 - 1, 2]]
    messages = [a_message(shape=shape) for shape in odd]
    messages += [a_message(raw=raw) for raw in (b"", bytes(7), bytes(9), None)]
    messages += [a_message(datatype=name) for name in ("BYTES", "FP16", "evil", "", "A" * 20_000)]
    both, none = a_message(contents={"fp32_contents": [1, 2]}), a_message(raw=None, contents={"int_contents": [1, 2]})
    twice = a_message()
    twice.raw_input_contents.append(bytes(8))
    return await serialized(door, *messages, both, none, twice, request_class("ModelInfer")(model_name=MODEL))


@MESSAGES.kind("BYTES of zero lengths, typed numbers by the million", TOO_MUCH)
async def dear_contents(door: Door) -> Iterable[str]:
    """Little on the wire, much in memory; refused for name or datatype before it is looked at."""
    lengths = a_message(datatype="BYTES", shape=[15_000_000, 1], raw=bytes(60_000_000))
    many = a_message(raw=None, datatype="INT64", shape=[1, 20_000_000], contents={"int64_contents": [0] * 20_000_000})
    empty = a_message(
        raw=None, datatype="BYTES", shape=[10_000_000, 1], contents={"bytes_contents": [b""] * 10_000_000}
    )
    return await serialized(door, lengths, many, empty)


@MESSAGES.kind("names of 20,000 characters in messages", INVALID | {"NOT_FOUND", "RESOURCE_EXHAUSTED"})
async def long_names(door: Door) -> Iterable[str]:
    """Told in a status that fits into a frame."""
    long = "A" * 20_000
    output, model, version = a_message(), a_message(), a_message()
    output.outputs.add(name=long)
    model.model_name = long
    version.model_version = long
    return await serialized(door, a_message(name=long), a_message(name="%" * 20_000), output, model, version)


@MESSAGES.kind("a name of 17 MB", TOO_MUCH | {"NOT_FOUND"})
async def longest_name(door: Door) -> Iterable[str]:
    """More than a frame may hold, of a tensor and of the model."""
    model = a_message()
    model.model_name = "A" * 17_000_000
    return await serialized(door, a_message(name="A" * 17_000_000), model)


@MESSAGES.kind("odd ids in messages", TOO_MUCH | {"OK"})
async def odd_ids(door: Door) -> Iterable[str]:
    """A euro sign, NUL, line ends, 100 kB."""
    messages = [a_message() for _ in range(4)]
    for message, name in zip(messages, ("€", "a\0b", "a\r\nx-evil: 1", "a" * 100_000), strict=True):
        message.id = name
    return await serialized(door, *messages)


@MESSAGES.kind("a million parameters in messages", TOO_MUCH | {"OK", "DEADLINE_EXCEEDED"})
async def many_parameters(door: Door) -> Iterable[str]:
    """Each unknown; and one without a value."""
    many, empty = a_message(), a_message()
    for n in range(300_000):
        many.parameters[f"p{n}"].int64_param = n
    empty.parameters["p"].SetInParent()
    return await serialized(door, many, empty)


@MESSAGES.kind("100,000 tensors in messages", TOO_MUCH)
async def many_tensors(door: Door) -> Iterable[str]:
    """Of unknown names, of one name, as outputs, and raw contents without tensors."""
    unknown, outputs, contents = a_message(raw=None), a_message(), a_message()
    for n in range(100_000):
        unknown.inputs.add(name=f"x{n}", datatype="FP32", shape=[0])
        outputs.outputs.add(name=f"y{n}")
    contents.raw_input_contents.extend([b""] * 1_000_000)
    return await serialized(door, unknown, outputs, contents)


@MESSAGES.kind("odd deadlines", BROKEN | {"OK", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"})
async def deadlines(door: Door) -> Iterable[str]:
    """grpc-timeout of nothing, of 11,000 years, negative, NaN, no number."""
    odd = (b"0n", b"99999999H", b"-1S", b"NaN", b"999999999S", b"1", b"S", b"1e9S", b"\xd9\xa3S")
    return await called(door, *(call_fields(INFER_PATH, (b"grpc-timeout", value)) for value in odd))


@MESSAGES.kind("timeouts that are none in messages", INVALID)
async def wrong_timeouts(door: Door) -> Iterable[str]:
    """Negative, NaN, text."""
    messages = [a_message() for _ in range(4)]
    messages[0].parameters["timeout"].int64_param = -1
    messages[1].parameters["timeout"].double_param = float("nan")
    messages[2].parameters["timeout"].string_param = "1s"
    messages[3].parameters["timeout"].bool_param = True
    return await serialized(door, *messages)


@MESSAGES.kind("timeouts without end in messages", INVALID | {"OK"})
async def huge_timeouts(door: Door) -> Iterable[str]:
    """2^63 and 2^64 microseconds: capped or refused."""
    messages = [a_message(), a_message()]
    messages[0].parameters["timeout"].int64_param = 2**63 - 1
    messages[1].parameters["timeout"].uint64_param = 2**64 - 1
    return await serialized(door, *messages)


@MESSAGES.kind("the largest legal message", SERVED_OR_NOT)
async def largest(door: Door) -> Iterable[str]:
    """63 MiB of raw contents, and as many bytes of typed ones."""
    numbers = 63 * MEBIBYTE // 4
    typed = a_message(raw=None, shape=[1, numbers - 99], contents={"fp32_contents": [1.0] * (numbers - 99)})
    return await serialized(door, a_message(shape=[1, numbers], raw=bytes(4 * numbers)), typed)


@MESSAGES.kind("eight of the largest messages at once", SERVED_OR_NOT)
async def largest_together(door: Door) -> Iterable[str]:
    """On connections of their own."""
    numbers = 12 * MEBIBYTE
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
