"""Protobufs that are none, lie about themselves, or are too much once read."""

from collections.abc import Iterable

from benchmarks.hostile import frames
from benchmarks.hostile.caller import INFER_PATH, call_fields
from benchmarks.hostile.door import MODEL, Door
from benchmarks.hostile.fields import called
from benchmarks.hostile.kinds import BROKEN, INVALID, TOO_MUCH, Family
from benchmarks.hostile.messages import a_message, sent, serialized
from trimtab_protocol.grpc_messages import request_class

PROTOBUFS = Family("gRPC values")


@PROTOBUFS.kind("messages that are no protobuf", INVALID)
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


@PROTOBUFS.kind("shapes and contents that lie", INVALID)
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


@PROTOBUFS.kind("BYTES of zero lengths, typed numbers by the million", TOO_MUCH)
async def dear_contents(door: Door) -> Iterable[str]:
    """Little on the wire, much in memory; refused for name or datatype before it is looked at."""
    lengths = a_message(datatype="BYTES", shape=[15_000_000, 1], raw=bytes(60_000_000))
    many = a_message(raw=None, datatype="INT64", shape=[1, 20_000_000], contents={"int64_contents": [0] * 20_000_000})
    empty = a_message(
        raw=None, datatype="BYTES", shape=[10_000_000, 1], contents={"bytes_contents": [b""] * 10_000_000}
    )
    return await serialized(door, lengths, many, empty)


@PROTOBUFS.kind("names of 20,000 characters in messages", INVALID | {"NOT_FOUND", "RESOURCE_EXHAUSTED"})
async def long_names(door: Door) -> Iterable[str]:
    """Told in a status that fits into a frame."""
    long = "A" * 20_000
    output, model, version = a_message(), a_message(), a_message()
    output.outputs.add(name=long)
    model.model_name = long
    version.model_version = long
    return await serialized(door, a_message(name=long), a_message(name="%" * 20_000), output, model, version)


@PROTOBUFS.kind("a name of 17 MB", TOO_MUCH | {"NOT_FOUND"})
async def longest_name(door: Door) -> Iterable[str]:
    """More than a frame may hold, of a tensor and of the model."""
    model = a_message()
    model.model_name = "A" * 17_000_000
    return await serialized(door, a_message(name="A" * 17_000_000), model)


@PROTOBUFS.kind("odd ids in messages", TOO_MUCH | {"OK"})
async def odd_ids(door: Door) -> Iterable[str]:
    """A euro sign, NUL, line ends, 100 kB."""
    messages = [a_message() for _ in range(4)]
    for message, name in zip(messages, ("€", "a\0b", "a\r\nx-evil: 1", "a" * 100_000), strict=True):
        message.id = name
    return await serialized(door, *messages)


@PROTOBUFS.kind("a million parameters in messages", TOO_MUCH | {"OK", "DEADLINE_EXCEEDED"})
async def many_parameters(door: Door) -> Iterable[str]:
    """Each unknown; and one without a value."""
    many, empty = a_message(), a_message()
    for n in range(300_000):
        many.parameters[f"p{n}"].int64_param = n
    empty.parameters["p"].SetInParent()
    return await serialized(door, many, empty)


@PROTOBUFS.kind("100,000 tensors in messages", TOO_MUCH)
async def many_tensors(door: Door) -> Iterable[str]:
    """Of unknown names, of one name, as outputs, and raw contents without tensors."""
    unknown, outputs, contents = a_message(raw=None), a_message(), a_message()
    for n in range(100_000):
        unknown.inputs.add(name=f"x{n}", datatype="FP32", shape=[0])
        outputs.outputs.add(name=f"y{n}")
    contents.raw_input_contents.extend([b""] * 1_000_000)
    return await serialized(door, unknown, outputs, contents)


@PROTOBUFS.kind("odd deadlines", BROKEN | {"OK", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"})
async def deadlines(door: Door) -> Iterable[str]:
    """grpc-timeout of nothing, of 11,000 years, negative, NaN, no number."""
    odd = (b"0n", b"99999999H", b"-1S", b"NaN", b"999999999S", b"1", b"S", b"1e9S", b"\xd9\xa3S")
    return await called(door, *(call_fields(INFER_PATH, (b"grpc-timeout", value)) for value in odd))


@PROTOBUFS.kind("timeouts that are none in messages", INVALID)
async def wrong_timeouts(door: Door) -> Iterable[str]:
    """Negative, NaN, text."""
    messages = [a_message() for _ in range(4)]
    messages[0].parameters["timeout"].int64_param = -1
    messages[1].parameters["timeout"].double_param = float("nan")
    messages[2].parameters["timeout"].string_param = "1s"
    messages[3].parameters["timeout"].bool_param = True
    return await serialized(door, *messages)


@PROTOBUFS.kind("timeouts without end in messages", INVALID | {"OK"})
async def huge_timeouts(door: Door) -> Iterable[str]:
    """2^63 and 2^64 microseconds: capped or refused."""
    messages = [a_message(), a_message()]
    messages[0].parameters["timeout"].int64_param = 2**63 - 1
    messages[1].parameters["timeout"].uint64_param = 2**64 - 1
    return await serialized(door, *messages)
