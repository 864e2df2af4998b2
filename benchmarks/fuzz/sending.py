"""Sends generated requests to the door and says how each was met."""

import asyncio
import re
from collections.abc import Sequence

from benchmarks.hostile import frames
from benchmarks.hostile.caller import STATUS_NAMES, call_fields, calling
from benchmarks.hostile.door import Door
from benchmarks.hostile.kinds import CUT, NOTHING
from benchmarks.hostile.wire import Place, ask, connected, status_of

PATIENCE_SECONDS = 5.0
SHORT_PATIENCE_SECONDS = 0.5
"""For requests that are broken on purpose: whoever waits for the rest of one is right to wait."""
WAITING = "waiting"
_GRPC_STATUS = re.compile(rb"\r\ngrpc-status: ([0-9]+)\r\n")
_CALL_ENDED = re.compile(_GRPC_STATUS.pattern + rb"|\r\ncontent-length: [0-9]+\r\n(?s:.*)\r\n\r\n", re.IGNORECASE)
"""A status, in the head or behind the body; or a whole head that announces a body behind which none can stand."""


async def http_requests(door: Door, requests: Sequence[bytes]) -> list[str]:
    """Well-framed requests, each on a connection of its own."""
    return await _asked(door.rest, requests)


async def http_requests_behind_the_door(door: Door, requests: Sequence[bytes]) -> list[str]:
    """The same, to the router itself."""
    return await _asked(door.behind, requests)


async def _asked(place: Place, requests: Sequence[bytes]) -> list[str]:
    return [await ask(place, request, patience_seconds=PATIENCE_SECONDS) for request in requests]


async def broken_http_requests_behind_the_door(door: Door, requests: Sequence[bytes]) -> list[str]:
    """The same, to the router itself."""
    return await _asked_broken(door.behind, requests)


async def _asked_broken(place: Place, requests: Sequence[bytes]) -> list[str]:
    asking = (ask(place, request, patience_seconds=SHORT_PATIENCE_SECONDS) for request in requests)
    return [code if code != NOTHING else WAITING for code in await asyncio.gather(*asking)]


async def calls_behind_the_door(door: Door, calls: Sequence[bytes]) -> list[str]:
    """Calls as Envoy passes them on, to the router itself."""
    return [await _status_of_call(door.behind, call) for call in calls]


async def _status_of_call(place: Place, call: bytes) -> str:
    """The call's gRPC status, wherever in the answer it stands; the HTTP status of an answer that has none."""
    async with connected(place) as wire:
        await wire.send(call, PATIENCE_SECONDS)
        await wire.until(lambda: _CALL_ENDED.search(wire.received) is not None, PATIENCE_SECONDS)
        told = _GRPC_STATUS.search(wire.received)
        if told is not None:
            return STATUS_NAMES.get(int(told[1]), told[1].decode())
        if wire.received:
            return status_of(bytes(wire.received))
        return CUT if wire.closed else NOTHING


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
