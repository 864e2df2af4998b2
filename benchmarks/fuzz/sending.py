"""Shell: sends generated requests to the door and says how each was met."""

import asyncio
from collections.abc import Sequence

from benchmarks.hostile import frames
from benchmarks.hostile.caller import Caller, call_fields, calling
from benchmarks.hostile.door import Door
from benchmarks.hostile.kinds import CUT, NOTHING
from benchmarks.hostile.wire import Wire, ask

PATIENCE_SECONDS = 5.0
SHORT_PATIENCE_SECONDS = 0.5
"""For requests that are broken on purpose: whoever waits for the rest of one is right to wait."""
WAITING = "waiting"


async def http_requests(door: Door, requests: Sequence[bytes]) -> list[str]:
    """Well-framed requests, each on a connection of its own."""
    return [await ask(door.rest, request, patience_seconds=PATIENCE_SECONDS) for request in requests]


async def broken_http_requests(door: Door, requests: Sequence[bytes]) -> list[str]:
    """Requests broken anywhere, all at once, each on a connection of its own."""
    asking = (ask(door.rest, request, patience_seconds=SHORT_PATIENCE_SECONDS) for request in requests)
    return [code if code != NOTHING else WAITING for code in await asyncio.gather(*asking)]


async def messages(door: Door, bodies: Sequence[bytes]) -> list[str]:
    """Framed messages, as many calls of one connection at once."""
    async with calling(door.grpc) as caller:
        block, numbers = frames.block(call_fields()), []
        for body in bodies:
            number = caller.stream()
            numbers.append(number)
            await caller.send(frames.headers(number, block))
            await caller.send_data(number, body, ends=True)
        return [await caller.end_of(number, PATIENCE_SECONDS) for number in numbers]


async def raw_frames(door: Door, calls: Sequence[bytes]) -> list[str]:
    """The frames of calls on streams 1, 3, 5 and so on; a connection that is cut or silent is followed by the next."""
    caller: Caller | None = None
    codes = []
    for place, sent in enumerate(calls):
        if caller is None:
            caller = Caller(await Wire.open(door.grpc))
            await caller.send(frames.PREFACE, frames.settings(), frames.frame(frames.SETTINGS, frames.ACK, 0))
        await caller.send(sent)
        ended = await caller.end_of(2 * place + 1, SHORT_PATIENCE_SECONDS / 10)
        codes.append(ended if ended != NOTHING else WAITING)
        if caller.goaway or caller.wire.closed or ended in {CUT, NOTHING}:
            caller.wire.close()
            caller = None
    if caller is not None:
        caller.wire.close()
    return codes
