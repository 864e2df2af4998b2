"""Stream client: chunks as they arrive, and streams that end early."""

import asyncio
import json
import socket
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from aiohttp.base_protocol import BaseProtocol
from aiohttp.streams import StreamReader

from tests.router.chats import ChatReplica
from trimtab_protocol import Tensor, rest
from trimtab_protocol.chat.internal_wire import Chunk
from trimtab_router.scheduling.replica_slots import BatchOutcome, Completed, ReplicaLost
from trimtab_router.transport.stream_client import StreamClient, StreamRequest, _events

OTHERS = 8
CHAT = b'[{"role": "user", "content": [{"type": "text", "text": "a"}]}]'


def written(text: str) -> bytes:
    return b'data: {"text": "%s", "tokens": 1}\n\n' % text.encode()


def opened() -> StreamReader:
    loop = asyncio.get_running_loop()
    protocol = BaseProtocol(loop)
    protocol.connection_made(asyncio.Transport())
    return StreamReader(protocol, 2**16, loop=loop)


async def listen(stream: StreamReader, reply: "asyncio.Queue[str]") -> None:
    async with asyncio.timeout(30) as patience:
        async for piece in _events(cast("Any", SimpleNamespace(content=stream)), patience, 30.0):
            assert isinstance(piece, Chunk)
            asyncio.get_running_loop().call_soon(reply.put_nowait, piece.text)


async def test_an_answer_that_begins_goes_ahead_of_those_that_go_on():
    reply, others, last = asyncio.Queue[str](), [opened() for _ in range(OTHERS)], opened()
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for stream in (*others, last):
            group.create_task(listen(stream, reply))
        for stream in others:
            stream.feed_data(written("begins"))
        assert [await reply.get() for _ in others] == ["begins"] * OTHERS

        for stream in others:
            stream.feed_data(written("goes on"))
        last.feed_data(written("begins"))  # in the same moment, and the last to be read

        assert [await reply.get() for _ in (*others, last)] == ["begins", *["goes on"] * OTHERS]
        for stream in (*others, last):
            stream.feed_eof()


async def generate_at(port: int, begin_seconds: float, messages: bytes = CHAT) -> BatchOutcome:
    tensor = Tensor("messages", "BYTES", np.array([messages], object))
    body, length = rest.encode_batch([[tensor]], {}, "r")
    headers = {rest.HEADER_LENGTH: str(length)}
    streams = StreamClient("replica-0", f"127.0.0.1:{port}", lambda: None)
    try:
        return await streams.generate(
            StreamRequest("/v2/models/small/generate_stream", b"".join(body), headers),
            point="default",
            begin_seconds=begin_seconds,
            gap_seconds=30.0,
            on_chunk=lambda _: None,
        )
    finally:
        await streams.close()


async def test_a_replica_that_dies_or_hangs_over_what_it_read_had_it():
    replica = ChatReplica(dies_reading=True)
    await replica.start()
    died = await generate_at(replica.port, 30.0)
    replica.dies_reading = False
    replica.gate.clear()
    hung = await generate_at(replica.port, 1.0)
    await replica.stop()

    assert [isinstance(lost, ReplicaLost) and lost.delivered for lost in (died, hung)] == [True, True]
    assert len(replica.written) == 2


async def test_a_replica_that_cannot_be_reached_did_not_have_it():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        ending = await generate_at(bound.getsockname()[1], 30.0)

    assert isinstance(ending, ReplicaLost)
    assert not ending.delivered


async def test_a_large_chat_arrives_whole():
    """A library's warning that it would hold up the loop would be an error here."""
    replica = ChatReplica()
    await replica.start()
    said = [{"role": "user", "content": [{"type": "text", "text": text}]} for text in ("a" * 2**21, "b")]
    ending = await generate_at(replica.port, 30.0, json.dumps(said).encode())
    await replica.stop()

    assert isinstance(ending, Completed), ending
    assert replica.written[0].messages == said
