"""Connection to a model server: bytes that follow a response in the same read belong to no request."""

import asyncio
import socket

from trimtab_protocol import event_loop
from trimtab_protocol.http_client import HttpConnection, request_head

BODY_BYTES = 70_000
"""More than a head has room for: the loop fills the body's own buffer to its end, and reads on at once."""


def test_data_after_a_body_is_not_the_next_response() -> None:
    async def ask(listening: socket.socket) -> None:
        connection = await HttpConnection.open(*listening.getsockname())
        server, _ = await asyncio.to_thread(listening.accept)
        with server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
            asking = asyncio.create_task(connection.exchange(request_head("GET", "/", "x", {}, 0)))
            assert await asyncio.to_thread(server.recv, 2**16)
            # All at once, while the loop stands still.
            server.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % BODY_BYTES + b"a" * BODY_BYTES + b"H")
            reply = await asking
            assert bytes(reply.body) == b"a" * BODY_BYTES
            async with asyncio.timeout(20):
                await connection.closed
            assert not connection.usable

    with socket.create_server(("127.0.0.1", 0)) as listening:
        event_loop.run(ask(listening))
