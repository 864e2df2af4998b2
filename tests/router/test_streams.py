"""What replicas write, as it is read; without a network."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from aiohttp.base_protocol import BaseProtocol
from aiohttp.streams import StreamReader

from trimtab_protocol.chat.inner import Piece
from trimtab_router.carriage.streams import _events


def said(text: str) -> bytes:
    return b'data: {"text": "%s", "tokens": 1}\n\n' % text.encode()


async def test_an_answer_that_begins_goes_ahead_of_those_that_go_on():
    """All streams are read in one moment, the one that begins last; its caller is told before the others are read."""
    loop, told = asyncio.get_running_loop(), list[str]()
    streams = [StreamReader(BaseProtocol(loop), 2**16, loop=loop) for _ in range(9)]

    async def listen(stream: StreamReader, said: "asyncio.Queue[str]") -> None:
        async with asyncio.timeout(30) as patience:
            async for piece in _events(cast("Any", SimpleNamespace(content=stream)), patience, 30.0):
                assert isinstance(piece, Piece)
                said.put_nowait(piece.text)

    async def tell(said: "asyncio.Queue[str]") -> None:
        while True:
            told.append(await said.get())

    async with asyncio.TaskGroup() as group:
        tellers = []
        for stream in streams:
            queue = asyncio.Queue[str]()
            group.create_task(listen(stream, queue))
            tellers.append(group.create_task(tell(queue)))
        await asyncio.sleep(0)
        for number, stream in enumerate(streams[:-1]):
            stream.feed_data(said(f"begins {number}"))
        while len(told) < 8:
            await asyncio.sleep(0)

        for number, stream in enumerate(streams[:-1]):
            stream.feed_data(said(f"goes on {number}"))
        streams[-1].feed_data(said("begins"))
        while len(told) < 17:
            await asyncio.sleep(0)
        for stream in streams:
            stream.feed_eof()
        for teller in tellers:
            teller.cancel()

    assert told[8] == "begins"
    assert sorted(told[9:]) == [f"goes on {number}" for number in range(8)]
