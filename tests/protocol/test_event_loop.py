"""Connections: each closes its own descriptor once, and data after a response belongs to no request."""

import asyncio
import gc
import os
import socket
import ssl
import time
from collections.abc import Iterator

import pytest

from trimtab_protocol import event_loop
from trimtab_protocol.http_client import HttpConnection, request_head


async def connected(listening: socket.socket) -> socket.socket:
    made = socket.socket()
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, listening.getsockname())
    return made


def held(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


async def cancelled(listening: socket.socket) -> socket.socket:
    sock = await connected(listening)
    connecting = asyncio.create_task(asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=sock))
    await asyncio.sleep(0)
    connecting.cancel()
    await asyncio.gather(connecting, return_exceptions=True)
    return sock


async def unanswered(listening: socket.socket) -> socket.socket:
    """A handshake that is never answered."""
    sock, context = await connected(listening), ssl.create_default_context()
    with pytest.raises(ConnectionAbortedError):
        await asyncio.get_running_loop().create_connection(
            asyncio.Protocol, sock=sock, ssl=context, server_hostname="localhost", ssl_handshake_timeout=0.05
        )
    return sock


@pytest.mark.parametrize("failing", [cancelled, unanswered])
def test_reused_descriptor_is_not_closed(listening, failing):
    async def reuse() -> None:
        sock = await failing(listening)
        await asyncio.sleep(0.02)  # the loop closes it in its next turns
        assert sock.fileno() == -1
        others = [os.dup(listening.fileno()) for _ in range(8)]
        del sock
        gc.collect()
        assert all(map(held, others))
        for each in others:
            os.close(each)

    event_loop.run(reuse())


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


async def test_service_that_fails_is_started_again(monkeypatch, caplog):
    monkeypatch.setattr(event_loop, "RESTART_SECONDS", 0.0)
    started_again, starts = asyncio.Event(), list[int]()

    async def service() -> None:
        starts.append(len(starts))
        if len(starts) == 1:
            raise OSError("No space left on device")
        started_again.set()
        await asyncio.Event().wait()

    task = event_loop.start_service("watch of a file", service)
    async with asyncio.timeout(10):
        await started_again.wait()
    task.cancel()

    assert starts == [0, 1]
    assert "watch of a file failed" in caplog.text


def test_lagging_loop_is_unready_until_it_hardly_lags():
    readiness, seen = event_loop.LagReadiness(), []
    for now, lag_seconds in [(1.0, 0.02), (2.0, 0.6), (3.0, 0.6), (4.0, 0.0), (7.5, 0.0), (8.5, 0.0), (9.0, 0.9)]:
        readiness.observe(lag_seconds, now)
        seen.append(readiness.reason)

    assert seen == ["", "", "its event loop lagged for 1.2 s of 5 s", seen[2], seen[2], "", ""]


async def test_lag_is_the_longest_pause_of_the_loop():
    monitor = event_loop.LagMonitor()
    watch = event_loop.start_service("lag", monitor.watch)
    await asyncio.sleep(0)
    assert monitor.seconds == 0.0
    time.sleep(event_loop.LAG_INTERVAL_SECONDS + 0.2)  # noqa: ASYNC251  (the pause)
    await asyncio.sleep(0.01)
    watch.cancel()

    assert monitor.seconds > 0.15
