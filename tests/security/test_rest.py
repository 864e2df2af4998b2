"""Hostile REST requests: values, bodies and headers that are wrong, too large, or meant for a proxy."""

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.figures import Figures
from tests.security.conftest import INFER, MEBIBYTE, MODEL, Server
from tests.security.raw_http import (
    BAD_REQUEST,
    CUT,
    LARGE_SECONDS,
    TOO_LARGE,
    Codes,
    ask,
    ask_all,
    connection,
    head,
    post,
    reset,
)

pytestmark = pytest.mark.security

TENSOR = b'{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}'
VALID_BODY = b'{"parameters":{"timeout":10000000},"inputs":[%s]}' % TENSOR
LONG_NAME = "A" * 20_000
SERVED_OR_NOT = TOO_LARGE | {"200", "503", "504"}
SLOW_SECONDS = 20.0
"""How long the server may keep a client that sends or reads nothing."""
CALM_SECONDS = 10.0
MAX_RATIO, MIN_P99_SECONDS = 2.0, 0.010
"""A calm p99 below ten milliseconds says more about the machine than about the router."""
TOO_SLOW = BAD_REQUEST | {"408", "413", "429", "503", "504"}


def infer(**fields: Any) -> bytes:
    """A body of one tensor with some fields replaced."""
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2], **fields}
    return json.dumps({"inputs": [tensor]}).encode()


def with_field(json_text: bytes) -> bytes:
    """The valid body with another field."""
    return VALID_BODY[:-1] + b"," + json_text + b"}"


def with_lines(*lines: str) -> bytes:
    """The valid request with additional header lines."""
    return post(INFER, VALID_BODY, *lines)


def binary(tensor: bytes, shape: object, datatype: str = "FP32", size: object = None, length: object = None) -> bytes:
    """A request with binary data; its size and the length of its header may be wrong."""
    parameters = {"binary_data_size": len(tensor) if size is None else size}
    entry = {"name": "x", "shape": shape, "datatype": datatype, "parameters": parameters}
    header = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    return post(INFER, header + tensor, f"Inference-Header-Content-Length: {len(header) if length is None else length}")


def posts(*bodies: bytes) -> list[bytes]:
    return [post(INFER, body) for body in bodies]


def surrogates() -> list[bytes]:
    """Half of a surrogate pair, in BYTES and in names."""
    half = b'"\\ud800"'
    tensor = b'{"inputs":[{"name":%s,"shape":[1,1],"datatype":"BYTES","data":[%s]}]}'
    return posts(tensor % (b'"x"', half), tensor % (half, b'"a"'), b'{"inputs":[],"outputs":[{"name":%s}]}' % half)


def shapes() -> list[bytes]:
    """Products that overflow, negative and missing dimensions, thousands of them, values that are no numbers."""
    wrong: list[object] = [[2**62, 4], [2**32, 2**32], [-1, -2], [0, 2], [2**63, 2], [1] * 10_000, [], 2]
    wrong += [[1.0, 2], ["1", "2"], [None], [10**400], [1, 10**12], [True, 2]]
    return [*posts(*(infer(shape=shape) for shape in wrong)), *(binary(bytes(8), shape) for shape in wrong)]


def numbers() -> list[bytes]:
    """NaN, infinities, beyond FP32, integers of a million digits, other types."""
    wrong = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 1_000_000, b'"1"', b"null", b"true", b"{}", b"1e39")
    return posts(*(VALID_BODY.replace(b"[1,2]}", b"[1,%s]}" % value) for value in wrong))


def no_json() -> list[bytes]:
    """Nothing, other encodings, other types, half a body."""
    wrong: list[bytes] = [b"", b"\xff\xfe{\0}\0", "{}".encode("utf-16"), b"\xef\xbb\xbf{", b"null", b"[]", b'"a"', b"1"]
    wrong += [VALID_BODY[:40], b"\0" * 1000, b"{" * 1000, b'{"inputs":{}}', b'{"inputs":[1]}', b'{"inputs":null}']
    return posts(*wrong)


def request_ids() -> list[bytes]:
    """In the body and as x-request-id: a euro sign, NUL, line ends, 100 kB, bytes that are no text."""
    in_body = ("€", "a\0b", "a\r\nx-evil: 1", "a" * 100_000, "\x7f", "😀" * 100)
    in_head = (b"\xe2\x82\xac", b"\xff\xfe", b"a" * 8000, b"\xed\xa0\x80")
    bodies = posts(*(with_field(b'"id":%s' % json.dumps(value).encode()) for value in in_body))
    return [*bodies, *(with_lines(f"x-request-id: {value.decode('latin-1')}") for value in in_head)]


def long_names() -> list[bytes]:
    """Of the model, a version, a tensor, a datatype, an output."""
    paths = (f"/v2/models/{LONG_NAME}/infer", f"/v2/models/{MODEL}/versions/{LONG_NAME}/infer")
    output = with_field(b'"outputs":[{"name":"%s"}]' % LONG_NAME.encode())
    bodies = posts(infer(name=LONG_NAME), infer(datatype=LONG_NAME), output)
    return [*(post(path, VALID_BODY) for path in paths), *bodies]


def deep() -> list[bytes]:
    """Arrays and objects in each other, as data and as the whole body."""
    arrays, objects = b"[" * 100_000 + b"]" * 100_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    within = VALID_BODY.replace(b"[1,2]}", b"%s}" % arrays)
    return posts(arrays, objects, within, with_field(b'"a":%s' % objects))


def content_encodings() -> list[bytes]:
    """Unknown ones, several at once, and gzip that is none."""
    names = ("compress", "x-evil", "gzip, gzip, gzip", "gzip", "br", "zstd")
    return [with_lines(f"Content-Encoding: {name}") for name in names]


def content_types() -> list[bytes]:
    """The body is JSON whatever its type says: no parser of forms or XML."""
    types = ("text/html", "multipart/form-data; boundary=" + "a" * 5000, "application/xml", "\xff\xfe")
    return [with_lines(f"Content-Type: {name}") for name in (*types, "application/grpc")]


def spoofed_headers() -> list[bytes]:
    """They change no client's identity, no timeout and no retry."""
    return [
        with_lines("x-forwarded-for: 10.0.0.1", "x-real-ip: 10.0.0.1", "forwarded: for=10.0.0.1;proto=https"),
        with_lines("x-trimtab-client: another", "x-trimtab-reason: none", "x-trimtab-stage: first"),
        with_lines("x-envoy-upstream-rq-timeout-ms: 1", "x-envoy-expected-rq-timeout-ms: 1"),
        with_lines("x-envoy-internal: true", "x-envoy-retry-on: 5xx", "x-envoy-max-retries: 99"),
        with_lines("x-envoy-original-path: /metrics", "x-original-url: /metrics", "x-rewrite-url: /metrics"),
        with_lines("x-http-method-override: DELETE", "x-envoy-decorator-operation: " + "a" * 1000),
    ]


def admin_paths() -> list[bytes]:
    """The router's and Envoy's own, plain and disguised."""
    paths = ["/metrics", "/trimtab/v1/state", "/trimtab/v1/arrivals", "/readyz", "/stats", "/config_dump"]
    paths += ["/quitquitquit", "/server_info", "/v2/../metrics", "/v2/%2e%2e/metrics", "/v2/models/..%2f..%2fmetrics"]
    paths += ["//metrics", "/v2//..//metrics", "/\\metrics", "/metrics/", "/v2/..;/metrics", "/%6detrics", "/./metrics"]
    return [head("GET", path) for path in paths]


WRONG_LENGTHS = (10**6, -1, "9" * 5000, "1e2", "+70", "0x46", "", 2**64, 1)
WRONG_SIZES = (9, 7, -8, 2**63, 10**400, 8.5, "8", True, [8])
WRONG_TIMEOUTS = (b"-1", b"NaN", b'"1s"', b"1.5", b"-1e400", b"true", b"null", b"[1]")
HUGE_TIMEOUTS = (315_360_000 * 10**6, 2**63, 10**400)
ELSEWHERE = BAD_REQUEST | {"301", "307", "401", "403", "404", "405"}


@pytest.mark.parametrize(
    ("requests", "codes"),
    [
        pytest.param(surrogates, BAD_REQUEST, id="strings that are no text"),
        pytest.param(shapes, BAD_REQUEST | {"413"}, id="wrong shapes"),
        pytest.param(numbers, BAD_REQUEST, id="values that are no numbers"),
        pytest.param(no_json, BAD_REQUEST, id="bodies that are no JSON"),
        pytest.param(request_ids, TOO_LARGE | {"200"}, id="odd ids"),
        pytest.param(long_names, TOO_LARGE | {"404"}, id="names of 20,000 characters"),
        pytest.param(deep, BAD_REQUEST | {"413"}, id="arrays 100,000 deep"),
        pytest.param(content_encodings, BAD_REQUEST | {"200", "415"}, id="unknown encodings"),
        pytest.param(content_types, BAD_REQUEST | {"200", "415"}, id="wrong content types"),
        pytest.param(spoofed_headers, frozenset({"200"}), id="headers that a proxy would believe"),
        pytest.param(admin_paths, ELSEWHERE, id="administrators' paths"),
        pytest.param(
            lambda: [binary(bytes(8), [1, 2], length=length) for length in WRONG_LENGTHS],
            BAD_REQUEST,
            id="wrong header lengths",
        ),
        pytest.param(
            lambda: [binary(bytes(8), [1, 2], size=size) for size in WRONG_SIZES], BAD_REQUEST, id="wrong binary sizes"
        ),
        pytest.param(
            lambda: posts(*(with_field(b'"parameters":{"timeout":%s}' % value) for value in WRONG_TIMEOUTS)),
            BAD_REQUEST,
            id="timeouts that are no durations",
        ),
        pytest.param(
            lambda: posts(*(with_field(b'"parameters":{"timeout":%d}' % value) for value in HUGE_TIMEOUTS)),
            BAD_REQUEST | {"200"},
            id="timeouts of years",
        ),
    ],
)
async def test_wrong_requests_are_rejected(
    hostile: Server, requests: Callable[[], Iterable[bytes]], codes: Codes
) -> None:
    met = await ask_all(hostile.local.rest_port, requests())

    assert set(met) <= codes
    assert hostile.local.ask()[0] == 200


def json_zeros() -> Iterator[bytes]:
    """Two bytes a number on the wire, many times that in memory."""
    count = 30_000_000
    start = b'{"inputs":[{"name":"x","shape":[1,%d],"datatype":"FP32","data":[' % (count + 1)
    yield post(INFER, start + b"0," * count + b"0]}]}")


def mebibyte_of(value: bytes) -> bytes:
    """JSON values, each of which is an object in memory."""
    count = MEBIBYTE // (len(value) + 1) - 100
    start = b'{"inputs":[{"name":"x","shape":[1,%d],"datatype":"FP32","data":[' % (count + 1)
    return post(INFER, start + (value + b",") * count + value + b"]}]}")


def many_parameters() -> Iterator[bytes]:
    """Of a tensor and of the request."""
    parameters = {f"p{n}": n for n in range(500_000)}
    yield post(INFER, infer(parameters=parameters))
    yield post(INFER, with_field(b'"parameters":' + json.dumps(parameters).encode()))


def bombs() -> Iterator[bytes]:
    """63 MiB and a gibibyte of zeros, a thousand times smaller on the wire."""
    yield post(INFER, gzip.compress(bytes(63 * MEBIBYTE)), "Content-Encoding: gzip")
    yield post(INFER, zipped_gibibyte(), "Content-Encoding: gzip")
    yield post(INFER, zlib.compress(bytes(63 * MEBIBYTE)), "Content-Encoding: deflate")


def zipped_gibibyte() -> bytes:
    packer, zeros = zlib.compressobj(9, zlib.DEFLATED, 31), bytes(MEBIBYTE)
    return b"".join(packer.compress(zeros) for _ in range(1024)) + packer.flush()


def many_tensors() -> Iterator[bytes]:
    """Inputs of one name, inputs of unknown names, outputs."""
    yield post(INFER, b'{"inputs":[%s]}' % b",".join([TENSOR] * 20_000))
    inputs = [{"name": f"x{n}", "shape": [0], "datatype": "FP32", "data": []} for n in range(50_000)]
    yield post(INFER, json.dumps({"inputs": inputs}).encode())
    yield post(INFER, with_field(b'"outputs":[%s]' % b",".join(b'{"name":"o%d"}' % n for n in range(100_000))))


@pytest.mark.parametrize(
    ("requests", "codes"),
    [
        pytest.param(json_zeros, TOO_LARGE, id="60 MB of JSON zeros"),
        pytest.param(lambda: map(mebibyte_of, (b"0.5", b"[]")), SERVED_OR_NOT, id="JSON of fractions and of lists"),
        pytest.param(many_parameters, TOO_LARGE | {"200", "504"}, id="500,000 parameters"),
        pytest.param(
            lambda: [binary(bytes(60_000_000), [15_000_000, 1], "BYTES")], TOO_LARGE, id="BYTES of zero lengths"
        ),
        pytest.param(bombs, TOO_LARGE | {"415"}, id="compressed bombs"),
        pytest.param(many_tensors, TOO_LARGE, id="100,000 tensors or outputs"),
        pytest.param(lambda: [binary(bytes(4_000_000), [1_000_000, 1])], TOO_LARGE, id="a million rows"),
    ],
)
async def test_bodies_that_need_much_memory_are_rejected(
    hostile: Server, requests: Callable[[], Iterable[bytes]], codes: Codes
) -> None:
    assert set(await ask_all(hostile.local.rest_port, requests(), large=True)) <= codes


async def test_largest_valid_requests_harm_no_others(hostile: Server) -> None:
    """As much binary data as is valid, as many bytes of JSON, and eight of them at once."""
    numbers, count = (hostile.payload_bytes - 1024) // 4, hostile.payload_bytes // 2 - 1024
    start = b'{"inputs":[{"name":"x","shape":[1,%d],"datatype":"FP32","data":[' % (count + 1)
    requests = [binary(bytes(4 * numbers), [1, numbers]), post(INFER, start + b"7," * count + b"7]}]}")]
    port = hostile.local.rest_port

    assert set(await ask_all(port, requests, large=True)) <= SERVED_OR_NOT
    together = (ask(port, requests[0], patience_seconds=LARGE_SECONDS) for _ in range(8))
    assert set(await asyncio.gather(*together)) <= SERVED_OR_NOT


async def test_endless_body_is_stopped(hostile: Server) -> None:
    chunk = b"100000\r\n" + b" " * MEBIBYTE + b"\r\n"
    pieces = (head("POST", INFER, "Transfer-Encoding: chunked"), *[chunk] * 512)

    assert await ask(hostile.local.rest_port, *pieces, patience_seconds=LARGE_SECONDS) in TOO_LARGE | {"408"}


async def test_rows_of_one_batch_with_long_ids_are_served(hostile: Server) -> None:
    request = with_lines("x-request-id: " + "a" * 4000)

    assert set(await asyncio.gather(*(ask(hostile.local.rest_port, request) for _ in range(40)))) == {"200"}


async def test_clients_that_leave_harm_no_others(hostile: Server) -> None:
    """Two hundred after their request, half of them with a TCP reset; ten in the middle of a large response."""
    for n in range(200):
        async with connection(hostile.local.rest_port) as (_, writer):
            writer.write(with_lines())
            await writer.drain()
            if n % 2:
                reset(writer)
        await asyncio.sleep(0.005)
    for _ in range(10):
        async with connection(hostile.local.rest_port) as (reader, writer):
            writer.write(binary(bytes(4 * MEBIBYTE), [1, MEBIBYTE]))
            await reader.read(1)
            reset(writer)


async def test_announced_bodies_that_never_come_are_ended(hostile: Server) -> None:
    """Eight clients announce all the memory there is."""
    request = head("POST", INFER, f"Content-Length: {64 * MEBIBYTE}") + b"{"
    asking = (ask(hostile.local.rest_port, request, patience_seconds=SLOW_SECONDS) for _ in range(8))

    assert set(await asyncio.gather(*asking)) <= TOO_SLOW


async def test_responses_that_nothing_reads_are_ended(hostile: Server) -> None:
    """Four clients request 32 MiB and read nothing for a while."""
    request = binary(bytes(32 * MEBIBYTE), [1, 8 * MEBIBYTE])

    async def read_late() -> str:
        async with connection(hostile.local.rest_port) as (reader, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(request)
            await asyncio.sleep(SLOW_SECONDS)
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            try:
                async with asyncio.timeout(LARGE_SECONDS):
                    response = await reader.read(-1)
            except (TimeoutError, OSError):
                return CUT
            is_cut = not response or response.startswith(b"HTTP/1.1 200")
            return CUT if is_cut else response.split()[1].decode()

    assert set(await asyncio.gather(*(read_late() for _ in range(4)))) <= TOO_SLOW


def test_friendly_clients_were_served_throughout(server: Server, figures: Figures) -> None:
    """All friendly requests of a run: this test is the last of its folder."""
    lines = [line for line in server.friendly_lines() if line.kind != "health"]
    calm_until = lines[0].at + CALM_SECONDS
    calm = [line.seconds for line in lines if line.at < calm_until]
    hostile = [line.seconds for line in lines if line.at >= calm_until]
    calm_p99, p99 = (float(np.quantile(seconds, 0.99)) for seconds in (calm, hostile))
    figures.add(requests=len(lines), calm_p99_seconds=round(calm_p99, 4), p99_seconds=round(p99, 4))

    assert [line for line in lines if line.code != "ok"] == []
    ratio = p99 / max(calm_p99, MIN_P99_SECONDS)
    figures.require("p99 beside hostile clients over calm p99", round(ratio, 2), "<=", MAX_RATIO, depends_on_load=True)
