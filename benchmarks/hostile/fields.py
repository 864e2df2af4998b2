"""gRPC calls with chosen header fields: metadata that a proxy would believe, and streams reset at once."""

import time
from collections.abc import Callable, Iterable

import numpy as np

from benchmarks.hostile import frames
from benchmarks.hostile.caller import INFER_PATH, call_fields, calling
from benchmarks.hostile.door import MODEL, Door
from benchmarks.hostile.http1 import PATIENT_SECONDS
from benchmarks.hostile.kinds import ENDED, Family
from benchmarks.hostile.wire import CUT_WITHIN_SECONDS
from trimtab_protocol import InferRequest, Tensor
from trimtab_protocol.grpc_messages import request_to_message

FIELDS = Family("gRPC metadata and resets")
Field = tuple[bytes, bytes]
FLOOD_BYTES = 32 * 2**20
FLOOD_SECONDS = 3.0
STREAMS_A_WRITE = 512


def good_message(value: float = 1.0) -> bytes:
    """Return a valid request as one framed gRPC message."""
    x = Tensor.of("x", np.full((1, 2), value, np.float32))
    request = InferRequest(MODEL, (x,), parameters={"timeout": int(1e6 * PATIENT_SECONDS)})
    return frames.message(request_to_message(request).SerializeToString())


async def called(door: Door, *all_fields: Iterable[Field], body: bytes | None = None) -> list[str]:
    """Make a call with each set of fields, each on a connection of its own."""
    codes = []
    for fields in all_fields:
        async with calling(door.grpc) as caller:
            codes.append(await caller.call(good_message() if body is None else body, fields))
    return codes


@FIELDS.kind("metadata that a proxy would believe", {"OK"})
async def spoofed(door: Door) -> Iterable[str]:
    """The metadata has no effect, as over REST."""
    metadata = [
        [(b"x-envoy-upstream-rq-timeout-ms", b"1")],
        [(b"x-forwarded-for", b"10.0.0.1"), (b"x-envoy-internal", b"true")],
        [(b"x-trimtab-client", b"somebody-else")],
        [(b"x-envoy-retry-grpc-on", b"internal")],
        [(b"grpc-status", b"13")],
    ]
    return await called(door, *(call_fields(INFER_PATH, *fields) for fields in metadata))


@FIELDS.kind("streams opened and reset at once", ENDED)
async def rapid_reset(door: Door) -> Iterable[str]:
    """Rapid reset (CVE-2023-44487), by RST_STREAM and by frames that make the server reset the stream."""
    return [await _reset_streams(door, end) for end in (frames.reset, lambda number: frames.window_update(number, 0))]


async def _reset_streams(door: Door, end: Callable[[int], bytes]) -> str:
    """Open streams and end each at once, until the connection ends or a bound is reached; return how it ended."""
    fields, sent, give_up = frames.block(call_fields()), 0, time.monotonic() + FLOOD_SECONDS
    async with calling(door.grpc) as caller:
        await caller.send()
        while sent < FLOOD_BYTES and time.monotonic() < give_up and caller.goaway is None:
            streams = [caller.stream() for _ in range(STREAMS_A_WRITE)]
            data = b"".join(frames.headers(stream, fields) + end(stream) for stream in streams)
            if not await caller.send(data):
                break
            sent += len(data)
        return await caller.end(CUT_WITHIN_SECONDS)
