"""What replicas write, as it is read; without a network."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from aiohttp.base_protocol import BaseProtocol
from aiohttp.streams import StreamReader

from trimtab_protocol.chat.inner import Piece
from trimtab_router.carriage.streams import _events

OTHERS = 8


def written(text: str) -> bytes:
    return b'data: {"text": "%s", "tokens": 1}\n\n' % text.encode()


def opened() -> StreamReader:
    """A stream that nothing has come on yet."""
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.connection_made(asyncio.Transport())
    return StreamReader(protocol, 2**16, loop=loop)


async def listen(stream: StreamReader, told: "asyncio.Queue[str]") -> None:
    """Whoever listens is told in the turn of the loop after the one in which a piece is read."""
    async with asyncio.timeout(30) as patience:
        async for piece in _events(cast("Any", SimpleNamespace(content=stream)), patience, 30.0):
            assert isinstance(piece, Piece)
            asyncio.get_running_loop().call_soon(told.put_nowait, piece.text)


async def test_an_answer_that_begins_goes_ahead_of_those_that_go_on():
    told, others, last = asyncio.Queue[str](), [opened() for _ in range(OTHERS)], opened()
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for stream in (*others, last):
            group.create_task(listen(stream, told))
        for stream in others:
            stream.feed_data(written("begins"))
        assert [await told.get() for _ in others] == ["begins"] * OTHERS

        for stream in others:
            stream.feed_data(written("goes on"))
        last.feed_data(written("begins"))  # in the same moment, and the last to be read

        assert [await told.get() for _ in (*others, last)] == ["begins", *["goes on"] * OTHERS]
        for stream in (*others, last):
            stream.feed_eof()
