"""HTTP/2 frames by the hundred thousand, each costing its sender next to nothing."""

import struct
import time
from collections.abc import Callable, Iterable

from benchmarks.hostile import frames
from benchmarks.hostile.caller import LIVE_PATH, Caller, call_fields, calling
from benchmarks.hostile.door import Door
from benchmarks.hostile.kinds import BROKEN, ENDED, KEPT, Family
from benchmarks.hostile.wire import CUT_WITHIN_SECONDS

FLOODS = Family("HTTP/2 floods")
FLOOD_BYTES = 32 * 2**20
FLOOD_SECONDS = 3.0
PIECE_BYTES = 64 * 1024
LIVE = frames.block(call_fields(LIVE_PATH))
OPEN = frames.headers(1, frames.block(call_fields()))


async def flood(caller: Caller, piece: bytes | Callable[[], bytes], *, reads: bool = True) -> str:
    """Send pieces until the connection ends, or for three seconds and 32 MiB; return how it ended."""
    await caller.send()
    if not reads:
        caller.wire.stop_reading()
    sent, give_up = 0, time.monotonic() + FLOOD_SECONDS
    while sent < FLOOD_BYTES and time.monotonic() < give_up and caller.goaway is None:
        data = piece if isinstance(piece, bytes) else piece()
        if not await caller.send(data):
            break
        sent += len(data)
    caller.wire.read_on()
    return await caller.end(CUT_WITHIN_SECONDS)


async def flooded(door: Door, *frame: bytes, opening: bytes = b"", reads: bool = True) -> list[str]:
    """Flood the gRPC port with one frame after another."""
    codes = []
    for one in frame:
        async with calling(door.grpc) as caller:
            await caller.send(opening)
            codes.append(await flood(caller, one * max(PIECE_BYTES // len(one), 1), reads=reads))
    return codes


@FLOODS.kind("PING, read and unread", ENDED)
async def pings(door: Door) -> Iterable[str]:
    """Each must be answered (CVE-2019-9512)."""
    ping = frames.frame(frames.PING, 0, 0, bytes(8))
    return [*await flooded(door, ping), *await flooded(door, ping, reads=False)]


@FLOODS.kind("SETTINGS, read and unread", ENDED)
async def settings(door: Door) -> Iterable[str]:
    """Each must be acknowledged (CVE-2019-9515)."""
    empty = frames.settings()
    return [*await flooded(door, empty), *await flooded(door, empty, reads=False)]


@FLOODS.kind("SETTINGS of thousands of entries over many streams", ENDED | {KEPT})
async def large_settings(door: Door) -> Iterable[str]:
    """Each entry changes the window of every open stream."""
    entries = struct.pack(">HI", frames.WINDOW_SETTING, 65_535) * (frames.LARGEST_FRAME_BYTES // 6)
    opening = b"".join(frames.headers(n, frames.block(call_fields())) for n in range(1, 200, 2))
    return await flooded(door, frames.frame(frames.SETTINGS, 0, 0, entries), opening=opening)


@FLOODS.kind("streams opened and reset at once", ENDED)
async def rapid_reset(door: Door) -> Iterable[str]:
    """The rapid reset (CVE-2023-44487), by RST_STREAM and by frames that make the server reset."""
    codes = []
    for end in (frames.reset, lambda number: frames.window_update(number, 0)):
        async with calling(door.grpc) as caller:

            def piece(caller: Caller = caller, end: Callable[[int], bytes] = end) -> bytes:
                numbers = [caller.stream() for _ in range(200)]
                return b"".join(frames.headers(n, frames.block(call_fields())) + end(n) for n in numbers)

            codes.append(await flood(caller, piece))
    return codes


@FLOODS.kind("RST_STREAM of streams that ended", ENDED)
async def late_resets(door: Door) -> Iterable[str]:
    """Of one stream, and of streams nobody opened."""
    ended = OPEN + frames.reset(1)
    return [*await flooded(door, frames.reset(1), opening=ended), *await flooded(door, frames.reset(999_999))]


@FLOODS.kind("WINDOW_UPDATE", ENDED)
async def window_updates(door: Door) -> Iterable[str]:
    """One more byte, again and again, on the connection and on a stream."""
    return [
        *await flooded(door, frames.window_update(0, 1)),
        *await flooded(door, frames.window_update(1, 1), opening=OPEN),
    ]


@FLOODS.kind("CONTINUATION without end", ENDED)
async def continuations(door: Door) -> Iterable[str]:
    """Header blocks that never end (CVE-2024-27316), of large frames, small ones and empty ones (CVE-2019-9518)."""
    opening = frames.frame(frames.HEADERS, 0, 1, LIVE)
    large = frames.block([(b"x-a", b"a" * 4000)]) * 4
    blocks = (large[: frames.LARGEST_FRAME_BYTES], frames.block([(b"x", b"1")]), b"")
    return await flooded(door, *(frames.frame(frames.CONTINUATION, 0, 1, b) for b in blocks), opening=opening)


@FLOODS.kind("empty DATA", BROKEN)
async def empty_data(door: Door) -> Iterable[str]:
    """Frames that carry nothing and end nothing, bare and padded."""
    padded = frames.frame(frames.DATA, frames.PADDED, 1, b"\xff" + bytes(255))
    return await flooded(door, frames.frame(frames.DATA, 0, 1), padded, opening=OPEN)


@FLOODS.kind("empty HEADERS", ENDED)
async def empty_headers(door: Door) -> Iterable[str]:
    """Header blocks of no field on an open stream, and on new ones."""
    codes = await flooded(door, frames.frame(frames.HEADERS, frames.END_HEADERS, 1), opening=OPEN)
    async with calling(door.grpc) as caller:
        end = await flood(caller, lambda: b"".join(frames.headers(caller.stream(), b"") for _ in range(1000)))
        told = list(caller.outcome.values())
    return [*codes, *(told if end == KEPT and told else [end])]


@FLOODS.kind("PRIORITY", ENDED)
async def priorities(door: Door) -> Iterable[str]:
    """The order of streams turned round again and again (CVE-2019-9513)."""
    return await flooded(door, frames.frame(frames.PRIORITY, 0, 1, bytes(5)), opening=OPEN)


@FLOODS.kind("frames of unknown kinds", ENDED | {KEPT})
async def unknown_frames(door: Door) -> Iterable[str]:
    """To be passed over, however many; extensions may define them."""
    return await flooded(door, frames.frame(0xBE, 0xFF, 0), frames.frame(0x0C, 0, 1, bytes(64)))


@FLOODS.kind("HPACK: references to one large field", BROKEN)
async def hpack_references(door: Door) -> Iterable[str]:
    """4 kB put into the table once and referred to 16,000 times: 64 MB of headers in 16 kB (CVE-2016-6581)."""
    codes = []
    for times in (100, 16_000):
        async with calling(door.grpc) as caller:
            bomb = frames.added(b"x-bomb", b"a" * 3900) + frames.block(call_fields()) + frames.indexed(62) * times
            number = caller.stream()
            await caller.send(frames.headers(number, bomb, frames.END_HEADERS | frames.END_STREAM))
            codes.append(await caller.end_of(number))
    return codes


@FLOODS.kind("HPACK: tables that grow", ENDED)
async def hpack_tables(door: Door) -> Iterable[str]:
    """A table larger than allowed; updates of its size without end; integers without end."""
    huge = frames.table_size(2**30) + LIVE
    codes = []
    for block in (
        huge,
        frames.table_size(0) * 1000 + frames.table_size(2**20) + LIVE,
        b"\xff" * 1000,
        b"\x3f" + b"\x80" * 9000,
    ):
        async with calling(door.grpc) as caller:
            await caller.send(frames.headers(1, block, frames.END_HEADERS | frames.END_STREAM))
            codes.append(await caller.end_of(1))
    return codes


@FLOODS.kind("HPACK: entries put in and thrown out", BROKEN | {"OK", "UNAVAILABLE", "RESOURCE_EXHAUSTED"})
async def hpack_churn(door: Door) -> Iterable[str]:
    """Each call fills the table anew; legal, and dear for the server alone."""
    codes = []
    async with calling(door.grpc) as caller:
        for turn in range(200):
            fields = b"".join(frames.added(b"x-%d-%d" % (turn, n), b"a" * 60) for n in range(40))
            number = caller.stream()
            await caller.send(frames.headers(number, frames.block(call_fields(LIVE_PATH)) + fields))
            await caller.send(frames.frame(frames.DATA, frames.END_STREAM, number, frames.message(b"")))
            codes.append(await caller.end_of(number))
            if caller.goaway or caller.wire.closed:
                break
    return codes


@FLOODS.kind("10,000 streams nobody finishes", BROKEN | {"UNAVAILABLE", "DEADLINE_EXCEEDED", "408", "504"})
async def unfinished_streams(door: Door) -> Iterable[str]:
    """HEADERS without an end: those too many are refused, the others given up in time."""
    async with calling(door.grpc) as caller:
        numbers = [caller.stream() for _ in range(10_000)]
        block = frames.block(call_fields())
        for at in range(0, len(numbers), 500):
            if not await caller.send(*(frames.headers(number, block) for number in numbers[at : at + 500])):
                break
        return [await caller.end_of(number, CUT_WITHIN_SECONDS) for number in (numbers[0], numbers[-1])]
