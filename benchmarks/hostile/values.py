"""REST bodies of ordinary size that lie about themselves or hold what nobody expects."""

import asyncio
import json
from collections.abc import Iterable

from benchmarks.hostile.bodies import binary, infer, sent
from benchmarks.hostile.door import INFER, Door
from benchmarks.hostile.http1 import GOOD_BODY, asked, with_lines
from benchmarks.hostile.kinds import BAD_REQUEST, TOO_LARGE, Family
from benchmarks.hostile.wire import ask, head, post

VALUES = Family("REST values")


@VALUES.kind("strings that are no text", BAD_REQUEST)
async def surrogates(door: Door) -> Iterable[str]:
    """Half of a surrogate pair, in BYTES, in names and in the id's place."""
    half = b'"\\ud800"'
    tensor = b'{"inputs":[{"name":%s,"shape":[1,1],"datatype":"BYTES","data":[%s]}]}'
    return await sent(
        door, tensor % (b'"x"', half), tensor % (half, b'"a"'), b'{"inputs":[],"outputs":[{"name":%s}]}' % half
    )


@VALUES.kind("encodings nobody knows", BAD_REQUEST | {"200", "415"})
async def encodings(door: Door) -> Iterable[str]:
    """Unknown ones, several at once, and gzip that is none."""
    names = ("compress", "x-evil", "gzip, gzip, gzip", "gzip", "br", "zstd")
    return await asked(door, *(with_lines(f"Content-Encoding: {name}") for name in names))


@VALUES.kind("header lengths that lie", BAD_REQUEST)
async def header_lengths(door: Door) -> Iterable[str]:
    """Inference-Header-Content-Length beyond the body, negative, of 5,000 digits, no number."""
    odd = (10**6, -1, "9" * 5000, "1e2", "+70", "0x46", "", "٣", 2**64, 1)
    return await asked(door, *(binary(bytes(8), [1, 2], length=value) for value in odd if str(value).isascii()))


@VALUES.kind("binary sizes that lie", BAD_REQUEST)
async def binary_sizes(door: Door) -> Iterable[str]:
    """Sizes beyond the body, negative, beyond any integer, no integers."""
    odd = (9, 7, -8, 2**63, 10**400, 8.5, "8", True, [8])
    return await asked(door, *(binary(bytes(8), [1, 2], size=value) for value in odd))


@VALUES.kind("shapes that lie", BAD_REQUEST | {"413"})
async def shapes(door: Door) -> Iterable[str]:
    """Products that overflow, negative and missing dimensions, thousands of them, no numbers."""
    odd: list[object] = [
        [2**62, 4],
        [2**32, 2**32],
        [-1, -2],
        [0, 2],
        [2**63, 2],
        [1] * 10_000,
        [],
        2,
        [1.0, 2],
        ["1", "2"],
        [None],
    ]
    odd += [[10**400], [1, 10**12], [True, 2]]
    return [*await sent(door, *(infer(shape=s) for s in odd)), *await asked(door, *(binary(bytes(8), s) for s in odd))]


@VALUES.kind("numbers that are none", BAD_REQUEST)
async def numbers(door: Door) -> Iterable[str]:
    """NaN, infinities, beyond FP32, integers of a million digits, strings, null."""
    odd = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 1_000_000, b'"1"', b"null", b"true", b"{}", b"1e39")
    return await sent(door, *(GOOD_BODY.replace(b"[1,2]}", b"[1,%s]}" % value) for value in odd))


@VALUES.kind("timeouts that are none", BAD_REQUEST)
async def wrong_timeouts(door: Door) -> Iterable[str]:
    """Negative, NaN, text, fractions."""
    odd = (b"-1", b"NaN", b'"1s"', b"1.5", b"-1e400", b"true", b"null", b"[1]")
    return await sent(door, *(GOOD_BODY[:-1] + b',"parameters":{"timeout":%s}}' % value for value in odd))


@VALUES.kind("timeouts without end", BAD_REQUEST | {"200"})
async def huge_timeouts(door: Door) -> Iterable[str]:
    """Ten years, 2^63 and 10^400 microseconds: capped or refused."""
    huge = (315_360_000 * 10**6, 2**63, 10**400)
    return await sent(door, *(GOOD_BODY[:-1] + b',"parameters":{"timeout":%d}}' % value for value in huge))


@VALUES.kind("odd ids", TOO_LARGE | {"200"})
async def odd_ids(door: Door) -> Iterable[str]:
    """In the body and as x-request-id: a euro sign, NUL, line ends, 100 kB, bytes that are no text."""
    odd = ("€", "a\0b", "a\r\nx-evil: 1", "a" * 100_000, "\x7f", "😀" * 100)
    in_body = [await ask(door.rest, post(INFER, GOOD_BODY[:-1] + b',"id":%s}' % json.dumps(i).encode())) for i in odd]
    raw = (b"\xe2\x82\xac", b"\xff\xfe", b"a" * 8000, b"\xed\xa0\x80")
    lines = (
        head("POST", INFER, f"Content-Length: {len(GOOD_BODY)}", f"x-request-id: {r.decode('latin-1')}") for r in raw
    )
    return [*in_body, *await asked(door, *(line + GOOD_BODY for line in lines))]


@VALUES.kind("ids of a batch's mates", {"200"})
async def ids_in_company(door: Door) -> Iterable[str]:
    """Forty at once with ids of 4 kB each, so that they share batches; all are served."""
    request = with_lines("x-request-id: " + "a" * 4000)
    return await asyncio.gather(*(ask(door.rest, request) for _ in range(40)))


@VALUES.kind("names of 20,000 characters", TOO_LARGE | {"404"})
async def long_names(door: Door) -> Iterable[str]:
    """Of the model, a tensor, a datatype, an output, a version."""
    long = "A" * 20_000
    in_path = (post(f"/v2/models/{long}/infer", GOOD_BODY), post(f"/v2/models/echo/versions/{long}/infer", GOOD_BODY))
    outputs = GOOD_BODY[:-1] + b',"outputs":[{"name":"%s"}]}' % long.encode()
    return [*await asked(door, *in_path), *await sent(door, infer(name=long), infer(datatype=long), outputs)]


@VALUES.kind("bodies that are no JSON", BAD_REQUEST)
async def no_json(door: Door) -> Iterable[str]:
    """Nothing, other encodings, other types, half of one."""
    odd = (
        b"",
        b"\xff\xfe{\0}\0",
        "{}".encode("utf-16"),
        b"\xef\xbb\xbf{",
        b"null",
        b"[]",
        b'"a"',
        b"1",
        GOOD_BODY[:40],
    )
    return await sent(door, *odd, b"\0" * 1000, b"{" * 1000, b'{"inputs":{}}', b'{"inputs":[1]}', b'{"inputs":null}')
