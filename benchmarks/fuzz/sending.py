"""Shell: sends generated requests to the door and says how each was met."""

import asyncio
from random import Random

from benchmarks.fuzz.generated import a_broken_http_request, a_prefixed_message, an_http_request, call_frames
from benchmarks.hostile import frames
from benchmarks.hostile.caller import Caller, call_fields, calling
from benchmarks.hostile.door import Door
from benchmarks.hostile.kinds import CUT, NOTHING
from benchmarks.hostile.wire import Wire, ask

PATIENCE_SECONDS = 5.0
SHORT_PATIENCE_SECONDS = 0.5
"""For requests that are broken on purpose: whoever waits for the rest of one is right to wait."""
CALLS_A_CONNECTION = 20
WAITING = "waiting"

Drawn = list[Random]


async def http_requests(door: Door, drawn: Drawn) -> list[str]:
    """Well-framed requests, each on a connection of its own."""
    return [await ask(door.rest, an_http_request(draw), patience_seconds=PATIENCE_SECONDS) for draw in drawn]


async def broken_http_requests(door: Door, drawn: Drawn) -> list[str]:
    """Requests broken anywhere, all at once, each on a connection of its own."""
    asking = (ask(door.rest, a_broken_http_request(draw), patience_seconds=SHORT_PATIENCE_SECONDS) for draw in drawn)
    return [code if code != NOTHING else WAITING for code in await asyncio.gather(*asking)]


async def messages(door: Door, drawn: Drawn) -> list[str]:
    """Messages in right frames, as many calls of one connection at once."""
    async with calling(door.grpc) as caller:
        block, numbers = frames.block(call_fields()), []
        for draw in drawn:
            number = caller.stream()
            numbers.append(number)
            await caller.send(frames.headers(number, block))
            await caller.send_data(number, a_prefixed_message(draw), ends=True)
        return [await caller.end_of(number, PATIENCE_SECONDS) for number in numbers]


async def raw_frames(door: Door, drawn: Drawn) -> list[str]:
    """Frames in any order and shape; once a connection is cut, the next begins."""
    caller: Caller | None = None
    codes = []
    for draw in drawn:
        if caller is None:
            caller = Caller(await Wire.open(door.grpc))
            await caller.send(frames.PREFACE, frames.settings(), frames.frame(frames.SETTINGS, frames.ACK, 0))
        number = caller.stream()
        await caller.send(call_frames(draw, number))
        ended = await caller.end_of(number, SHORT_PATIENCE_SECONDS / 10)
        codes.append(ended if ended != NOTHING else WAITING)
        if caller.goaway or caller.wire.closed or ended == CUT:
            caller.wire.close()
            caller = None
    if caller is not None:
        caller.wire.close()
    return codes
