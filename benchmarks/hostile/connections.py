"""Connections: too many, too slow, half open, and never read from."""

import asyncio
import re
import time
from collections.abc import Callable, Iterable

from benchmarks.hostile import frames
from benchmarks.hostile.bodies import MEBIBYTE, binary
from benchmarks.hostile.caller import INFER_PATH, STATUS_NAMES, Caller, call_fields, calling
from benchmarks.hostile.door import INFER, Door
from benchmarks.hostile.http1 import GOOD
from benchmarks.hostile.kinds import CUT, ENDED, INVALID, KEPT, LEFT, NOTHING, TOO_SLOW, Family
from benchmarks.hostile.messages import a_message
from benchmarks.hostile.wire import CUT_WITHIN_SECONDS, Wire, answered, connected, head, reply, status_of, together

CONNECTIONS = Family("connections")
ANNOUNCED = head("POST", INFER, f"Content-Length: {64 * MEBIBYTE}")
DRIP_SECONDS = 0.5


async def many(port: int, count: int, hello: bytes, hold_seconds: float) -> list[str]:
    """Hold so many connections open; whether they were kept or cut does not matter to them."""
    wires: list[Wire] = []
    try:
        for at in range(0, count, 100):
            opened = await asyncio.gather(*(Wire.open(port) for _ in range(at, at + 100)), return_exceptions=True)
            wires += [wire for wire in opened if isinstance(wire, Wire)]
        for wire in wires:
            await wire.send(hello)
        await asyncio.sleep(hold_seconds)
        return [KEPT if not wire.closed else CUT for wire in wires] or [CUT]
    finally:
        for wire in wires:
            wire.close()


@CONNECTIONS.kind("3,000 idle connections at each port", {KEPT, CUT})
async def idle(door: Door) -> Iterable[str]:
    """Connected, and not a word."""
    return await many(door.rest, 3000, b"", 1.5) + await many(door.grpc, 3000, b"", 1.5)


@CONNECTIONS.kind("1,000 idle HTTP/2 connections", {KEPT, CUT})
async def idle_http2(door: Door) -> Iterable[str]:
    """With a right hello, and half of one."""
    hello = frames.PREFACE + frames.settings()
    return await many(door.grpc, 500, hello, 1.0) + await many(door.grpc, 500, frames.PREFACE[:9], 1.0)


@CONNECTIONS.kind("connections opened and closed", {LEFT})
async def churn(door: Door) -> Iterable[str]:
    """Two thousand in a row at each port, every other one with a TCP reset."""
    for port in (door.rest, door.grpc):
        for at in range(0, 2000, 50):
            for n, wire in enumerate(await asyncio.gather(*(Wire.open(port) for _ in range(50)))):
                wire.close(abruptly=bool((at + n) % 2))
    return [LEFT]


@CONNECTIONS.kind("half-open connections", ENDED | {"200", "400", "408"})
async def half_open(door: Door) -> Iterable[str]:
    """Our side is closed in the middle of a head, of a body, and after a whole request."""
    codes = []
    for sent in (GOOD[:20], GOOD[:-5], GOOD):
        async with connected(door.rest) as wire:
            await wire.send(sent)
            wire.send_end()
            codes.append(await reply(wire))
    return codes


async def drip(port: int, first: bytes, drop: Callable[[], bytes], *, count: int = 20) -> list[str]:
    """Send a beginning, then drops of it on many connections until each is ended, for at most fifteen seconds."""
    wires = await asyncio.gather(*(Wire.open(port) for _ in range(count)))
    give_up = time.monotonic() + CUT_WITHIN_SECONDS
    try:
        for wire in wires:
            await wire.send(first)
        while time.monotonic() < give_up and not all(wire.closed or answered(wire) for wire in wires):
            for wire in wires:
                await wire.send(drop(), 0.01)
            await asyncio.sleep(DRIP_SECONDS)
        return [await reply(wire, 0.01) for wire in wires]
    finally:
        for wire in wires:
            wire.close()


@CONNECTIONS.kind("heads sent byte by byte", TOO_SLOW)
async def slow_heads(door: Door) -> Iterable[str]:
    """Slowloris: one more header line every half second, and one that never ends its first."""
    lines = drip(door.rest, head("POST", INFER)[:-2], lambda: b"x-a: b\r\n")
    return await together(lines, drip(door.rest, b"GET /", lambda: b"a"))


@CONNECTIONS.kind("bodies sent byte by byte", TOO_SLOW)
async def slow_bodies(door: Door) -> Iterable[str]:
    """A byte every half second, of few announced and in chunks."""
    announced = drip(door.rest, head("POST", INFER, "Content-Length: 5000"), lambda: b" ")
    chunked = head("POST", INFER, "Transfer-Encoding: chunked")
    return await together(announced, drip(door.rest, chunked, lambda: b"1\r\n \r\n"))


@CONNECTIONS.kind("64 MiB announced and never sent", TOO_SLOW)
async def announced_rest(door: Door) -> Iterable[str]:
    """A few connections that claim all the room there is."""
    return await drip(door.rest, ANNOUNCED + b"{", lambda: b"", count=8)


@CONNECTIONS.kind("100-continue, and never a body", TOO_SLOW | {"417"})
async def expecting(door: Door) -> Iterable[str]:
    """Waits to be asked for it, and is silent then."""
    return await drip(door.rest, ANNOUNCED[:-2] + b"Expect: 100-continue\r\n\r\n", lambda: b"", count=8)


@CONNECTIONS.kind("64 MiB announced over gRPC and never sent", TOO_SLOW)
async def announced_grpc(door: Door) -> Iterable[str]:
    """Five bytes of DATA that claim all the room there is, on streams of one connection."""
    async with calling(door.grpc) as caller:
        numbers = [caller.stream() for _ in range(8)]
        for number in numbers:
            prefix = frames.frame(frames.DATA, 0, number, frames.message(b"", length=64 * MEBIBYTE))
            await caller.send(frames.headers(number, frames.block(call_fields())), prefix)
        return await _ends(caller, numbers)


@CONNECTIONS.kind("19 MB of 20 over gRPC on HTTP/1.1", INVALID | TOO_SLOW)
async def stopped_grpc(door: Door) -> Iterable[str]:
    """Sixteen that send most of a message at once and then nothing: by HTTP/1.1 no window bounds what they send."""
    lines = ("Content-Type: application/grpc", "TE: trailers", "Content-Length: 20000000")
    begun = head("POST", INFER_PATH.decode(), *lines) + frames.message(bytes(19_000_000), length=20_000_000 - 5)

    async def one() -> str:
        async with connected(door.grpc) as wire:
            await wire.send(begun, CUT_WITHIN_SECONDS)
            await wire.until(lambda: b"\r\n\r\n" in wire.received, CUT_WITHIN_SECONDS)
            told = re.search(rb"\r\ngrpc-status: (\d+)", wire.received)
            return await reply(wire, 0.01) if told is None else STATUS_NAMES[int(told[1])]

    return await asyncio.gather(*(one() for _ in range(16)))


@CONNECTIONS.kind("19 MB of 20 over gRPC on HTTP/2", TOO_SLOW)
async def stopped_calls(door: Door) -> Iterable[str]:
    """The same by calls as they should be, each on a connection of its own."""

    async def one() -> str:
        async with calling(door.grpc) as caller:
            number = caller.stream()
            await caller.send(frames.headers(number, frames.block(call_fields())))
            begun = frames.message(bytes(19_000_000), length=20_000_000 - 5)
            await caller.send_data(number, begun, ends=False)
            return await caller.end_of(number, CUT_WITHIN_SECONDS)

    return await asyncio.gather(*(one() for _ in range(16)))


@CONNECTIONS.kind("messages sent byte by byte", TOO_SLOW)
async def slow_messages(door: Door) -> Iterable[str]:
    """A byte of DATA every half second on each of twenty streams."""
    async with calling(door.grpc) as caller:
        numbers = [caller.stream() for _ in range(20)]
        block, prefix = frames.block(call_fields()), frames.message(b"", length=5000)
        await caller.send(*(frames.headers(n, block) + frames.frame(frames.DATA, 0, n, prefix) for n in numbers))
        give_up = time.monotonic() + CUT_WITHIN_SECONDS
        while time.monotonic() < give_up and len(caller.outcome) < len(numbers) and not caller.wire.closed:
            await caller.send(*(frames.frame(frames.DATA, 0, n, b"\0") for n in numbers if n not in caller.outcome))
            await asyncio.sleep(DRIP_SECONDS)
        return [await caller.end_of(number, 0.01) for number in numbers]


@CONNECTIONS.kind("answers that nobody reads, REST", TOO_SLOW | {"503"})
async def unread_rest(door: Door) -> Iterable[str]:
    """Asks for 32 MiB four times and takes nothing; then looks whether the connection is still there."""
    request = binary(bytes(32 * MEBIBYTE), [1, 8 * MEBIBYTE])

    async def one() -> str:
        async with connected(door.rest) as wire:
            wire.stop_reading()
            await wire.send(request)
            await asyncio.sleep(CUT_WITHIN_SECONDS)
            wire.read_on()
            await wire.until(lambda: bool(wire.received))
            await wire.until(lambda: len(wire.received) > 32 * MEBIBYTE)
            return _unread(wire)

    return await asyncio.gather(*(one() for _ in range(4)))


def _unread(wire: Wire) -> str:
    """A refusal's status; `kept` for an answer that was kept for the caller all the while."""
    status = status_of(bytes(wire.received[:64])) if wire.received else NOTHING
    if status.isdigit() and status != "200":
        return status
    return CUT if wire.closed else (KEPT if wire.received else NOTHING)


@CONNECTIONS.kind("answers that nobody reads, gRPC", TOO_SLOW | {"OK"})
async def unread_grpc(door: Door) -> Iterable[str]:
    """A window of no bytes, 16 MiB answers, and never more room."""
    async with calling(door.grpc, (frames.WINDOW_SETTING, 0)) as caller:
        numbers = [caller.stream() for _ in range(4)]
        size = 4 * MEBIBYTE
        body = frames.message(a_message(shape=[1, size], raw=bytes(4 * size)).SerializeToString())
        for number in numbers:
            await caller.send(frames.headers(number, frames.block(call_fields())))
            await caller.send_data(number, body, ends=True)
        return await _ends(caller, numbers)


async def _ends(caller: Caller, numbers: list[int]) -> list[str]:
    give_up = time.monotonic() + CUT_WITHIN_SECONDS
    return [await caller.end_of(number, max(give_up - time.monotonic(), 0.01)) for number in numbers]
