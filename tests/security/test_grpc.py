"""Hostile gRPC calls: protobuf and values that are wrong or too large, and framing that lies.

Well-framed messages go through Envoy by grpcio; all others to the router's socket, as Envoy would pass them.
"""

import asyncio
import gzip
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from tests.security.conftest import MEBIBYTE, MODEL, Server
from tests.security.raw_http import CUT, INFER_CALL, LARGE_SECONDS, Codes, call, grpc_frame, grpc_post, head
from tests.security.test_rest import zipped_gibibyte
from trimtab_protocol.grpc_messages import request_class

pytestmark = pytest.mark.security

INVALID = frozenset({CUT, "INVALID_ARGUMENT"})
TOO_MUCH = INVALID | {"RESOURCE_EXHAUSTED", "UNKNOWN", "413"}
MALFORMED = INVALID | {"400", "404", "INTERNAL", "UNIMPLEMENTED", "UNKNOWN", "RESOURCE_EXHAUSTED"}
SERVED_OR_NOT = TOO_MUCH | {"OK", "UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL"}
"""INTERNAL is grpcio's code of a stream that Envoy resets because its memory is full."""
TIMEOUT_MICROSECONDS = 10_000_000


def message(*, raw: bytes | None = b"\0" * 8, **fields: Any) -> Any:
    """A ModelInferRequest of one tensor, with some fields of the tensor replaced."""
    request = request_class("ModelInfer")(model_name=MODEL)
    request.parameters["timeout"].int64_param = TIMEOUT_MICROSECONDS
    request.inputs.add(**{"name": "x", "datatype": "FP32", "shape": [1, 2], **fields})
    if raw is not None:
        request.raw_input_contents.append(raw)
    return request


def with_parameter(**value: Any) -> Any:
    request = message()
    (name, given), parameter = next(iter(value.items())), request.parameters["timeout"]
    setattr(parameter, name, given)
    return request


def valid_frame() -> bytes:
    return grpc_frame(message().SerializeToString())


@asynccontextmanager
async def channel(server: Server) -> AsyncIterator[grpc.aio.Channel]:
    unlimited = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.local.grpc_port}", options=unlimited) as opened:
        yield opened


async def status_of(calling: Awaitable[Any]) -> str:
    try:
        await calling
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


async def call_all(server: Server, messages: Iterable[Any], metadata: Sequence[tuple[str, str]] = ()) -> list[str]:
    """Call ModelInfer through Envoy with each message, serialized or not."""
    async with channel(server) as opened:
        infer = opened.unary_unary(INFER_CALL, None, None)
        bodies = (each if isinstance(each, bytes) else each.SerializeToString() for each in messages)
        return [await status_of(infer(body, timeout=LARGE_SECONDS, metadata=metadata)) for body in bodies]


def no_protobuf() -> list[bytes]:
    """Noise, cut short, groups 100,000 deep, text that is no UTF-8, lengths beyond the end."""
    valid: bytes = message().SerializeToString()
    wrong = (b"\xff" * 100, valid[:-3], b"\x0b" * 100_000, b"\x0a\x02\xff\xfe" + valid, b"\x0a\xff\xff\xff\xff\x0f")
    return [*wrong, bytes(range(256))]


def shapes_and_contents() -> Iterator[Any]:
    """Products that overflow, thousands of dimensions, contents of another size, type or number."""
    wrong: list[list[int]] = [[2**62, 4], [2**32, 2**32], [-1, -2], [0, 2], [1] * 10_000, [], [1, 3], [2**63 - 1, 2]]
    yield from (message(shape=shape) for shape in wrong)
    yield from (message(raw=raw) for raw in (b"", bytes(7), bytes(9), None))
    yield from (message(datatype=name) for name in ("BYTES", "FP16", "evil", "", "A" * 20_000))
    yield message(contents={"fp32_contents": [1, 2]})
    yield message(raw=None, contents={"int_contents": [1, 2]})
    twice = message()
    twice.raw_input_contents.append(bytes(8))
    yield twice
    yield request_class("ModelInfer")(model_name=MODEL)


def expensive_contents() -> Iterator[Any]:
    """Few bytes on the wire, much memory once parsed."""
    yield message(datatype="BYTES", shape=[15_000_000, 1], raw=bytes(60_000_000))
    count = 20_000_000
    yield message(raw=None, datatype="INT64", shape=[1, count], contents={"int64_contents": [0] * count})
    count = 10_000_000
    yield message(raw=None, datatype="BYTES", shape=[count, 1], contents={"bytes_contents": [b""] * count})


def long_names(length: int) -> Iterator[Any]:
    """Of a tensor, an output, the model, its version."""
    output, model, version = message(), message(), message()
    output.outputs.add(name="A" * length)
    model.model_name = "A" * length
    version.model_version = "A" * length
    yield from (message(name="A" * length), message(name="%" * length), output, model, version)


def request_ids() -> Iterator[Any]:
    for request_id in ("€", "a\0b", "a\r\nx-evil: 1", "a" * 100_000):
        request = message()
        request.id = request_id
        yield request


def many_parameters() -> Iterator[Any]:
    """And one without a value."""
    many, empty = message(), message()
    for n in range(300_000):
        many.parameters[f"p{n}"].int64_param = n
    empty.parameters["p"].SetInParent()
    yield from (many, empty)


def many_tensors() -> Iterator[Any]:
    """Of unknown names, as outputs, and raw contents without tensors."""
    unknown, outputs, contents = message(raw=None), message(), message()
    for n in range(100_000):
        unknown.inputs.add(name=f"x{n}", datatype="FP32", shape=[0])
        outputs.outputs.add(name=f"y{n}")
    contents.raw_input_contents.extend([b""] * 1_000_000)
    yield from (unknown, outputs, contents)


def wrong_timeouts() -> Iterator[Any]:
    wrong = {"int64_param": -1, "double_param": float("nan"), "string_param": "1s", "bool_param": True}
    return (with_parameter(**{name: value}) for name, value in wrong.items())


@pytest.mark.parametrize(
    ("messages", "codes"),
    [
        pytest.param(no_protobuf, INVALID, id="no protobuf"),
        pytest.param(shapes_and_contents, INVALID, id="wrong shapes and contents"),
        pytest.param(expensive_contents, TOO_MUCH, id="contents that need much memory"),
        pytest.param(lambda: long_names(20_000), TOO_MUCH | {"NOT_FOUND"}, id="names of 20,000 characters"),
        pytest.param(
            lambda: itertools.islice(long_names(17_000_000), 4), TOO_MUCH | {"NOT_FOUND"}, id="names of 17 MB"
        ),
        pytest.param(request_ids, TOO_MUCH | {"OK"}, id="odd ids"),
        pytest.param(many_parameters, TOO_MUCH | {"OK", "DEADLINE_EXCEEDED"}, id="300,000 parameters"),
        pytest.param(many_tensors, TOO_MUCH, id="100,000 tensors"),
        pytest.param(wrong_timeouts, INVALID, id="timeouts that are no durations"),
        pytest.param(
            lambda: (with_parameter(int64_param=2**63 - 1), with_parameter(uint64_param=2**64 - 1)),
            INVALID | {"OK"},
            id="timeouts of centuries",
        ),
    ],
)
async def test_wrong_messages_are_rejected(
    hostile: Server, messages: Callable[[], Iterable[Any]], codes: Codes
) -> None:
    assert set(await call_all(hostile, messages())) <= codes


@pytest.mark.parametrize(
    "metadata",
    [
        (("x-envoy-upstream-rq-timeout-ms", "1"),),
        (("x-forwarded-for", "10.0.0.1"), ("x-envoy-internal", "true")),
        (("x-trimtab-client", "another"),),
        (("x-envoy-retry-grpc-on", "internal"),),
    ],
)
async def test_metadata_that_a_proxy_would_believe_is_ignored(
    hostile: Server, metadata: Sequence[tuple[str, str]]
) -> None:
    assert await call_all(hostile, [message()], metadata) == ["OK"]


async def test_largest_valid_messages_harm_no_others(hostile: Server) -> None:
    """As many raw contents as are valid, as many bytes of typed ones, and eight messages at once."""
    count = (hostile.payload_bytes - 1024) // 4
    raw = message(shape=[1, count], raw=bytes(4 * count))
    typed = message(raw=None, shape=[1, count - 99], contents={"fp32_contents": [1.0] * (count - 99)})

    assert set(await call_all(hostile, [raw, typed])) <= SERVED_OR_NOT
    together = await asyncio.gather(*(call_all(hostile, [raw]) for _ in range(8)))
    assert set(itertools.chain.from_iterable(together)) <= SERVED_OR_NOT


async def test_cancelled_calls_harm_no_others(hostile: Server) -> None:
    """Three hundred calls, each cancelled at some point of its life."""
    async with channel(hostile) as opened:
        infer = opened.unary_unary(INFER_CALL, None, None)
        for turn in range(300):
            calling = infer(message().SerializeToString())
            await asyncio.sleep(0.001 * (turn % 8))
            calling.cancel()


async def test_unknown_methods_are_rejected_at_once(hostile: Server) -> None:
    """Also if the client keeps its stream open."""
    service = "/inference.GRPCInferenceService/"
    paths = [service + "ModelStreamInfer", service + "RepositoryIndex", "/evil.Service/Do", "/a/b", "/" + "a" * 5000]

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b""
            await asyncio.sleep(1)

    async with channel(hostile) as opened:
        codes = [await status_of(opened.unary_unary(path, None, None)(b"", timeout=LARGE_SECONDS)) for path in paths]
        stream = opened.stream_stream(paths[0], None, None)(endless(), timeout=LARGE_SECONDS)
        codes.append(await status_of(anext(aiter(stream))))

    assert set(codes) == {"UNIMPLEMENTED"}


def wrong_frames() -> Iterator[bytes]:
    """No message, two, many; lengths too long, too short, of 4 GiB; unknown flags; half a prefix."""
    body, valid = message().SerializeToString(), valid_frame()
    yield from (b"", valid * 2, valid * 1000, valid + b"\0", b"\0", b"\0\0\0\0")
    for length in (len(body) + 1, len(body) - 1, 0, 2**32 - 1, 2**26):
        yield grpc_frame(body, length=length)
    yield from (grpc_frame(body, flag=flag) for flag in (1, 7, 255))


def wrong_compression() -> Iterator[bytes]:
    """Unknown encodings, gzip that is none, gzip cut short."""
    body = message().SerializeToString()
    packed = gzip.compress(body)
    for encoding, content in (("snappy", body), ("zstd", body), ("gzip", body), ("gzip", packed[:-9]), ("é", packed)):
        yield grpc_post(grpc_frame(content, flag=1), f"grpc-encoding: {encoding}")


def compressed_bombs() -> Iterator[bytes]:
    """63 MiB and a gibibyte of zeros, a thousand times smaller on the wire."""
    for packed in (gzip.compress(bytes(63 * MEBIBYTE)), zipped_gibibyte()):
        yield grpc_post(grpc_frame(packed, flag=1), "grpc-encoding: gzip")


def wrong_deadlines() -> Iterator[bytes]:
    """Of nothing, of 11,000 years, negative, no number."""
    for value in ("0n", "99999999H", "-1S", "NaN", "999999999S", "1", "S", "1e9S", "\xb2S"):
        yield grpc_post(valid_frame(), f"grpc-timeout: {value}")


@pytest.mark.parametrize(
    ("calls", "codes"),
    [
        pytest.param(lambda: map(grpc_post, wrong_frames()), MALFORMED, id="frames that lie"),
        pytest.param(wrong_compression, MALFORMED, id="compression that cannot be read"),
        pytest.param(compressed_bombs, TOO_MUCH, id="compressed bombs"),
        pytest.param(wrong_deadlines, MALFORMED | {"OK", "DEADLINE_EXCEEDED"}, id="odd deadlines"),
    ],
)
async def test_wrong_framing_is_rejected(hostile: Server, calls: Callable[[], Iterable[bytes]], codes: Codes) -> None:
    assert {await call(hostile.router_socket, each) for each in calls()} <= codes


@pytest.mark.parametrize("length", [2**32 - 1, 1])
async def test_endless_message_is_stopped(hostile: Server, length: int) -> None:
    """At most 128 MiB are sent."""
    lines = ("te: trailers", "content-type: application/grpc", "Transfer-Encoding: chunked")
    pieces = [b"100000\r\n" + bytes(MEBIBYTE) + b"\r\n"] * 128
    begun = b"5\r\n" + grpc_frame(b"", length=length) + b"\r\n"

    assert await call(hostile.router_socket, head("POST", INFER_CALL, *lines), begun, *pieces) in TOO_MUCH
