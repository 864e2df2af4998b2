"""TCP relay in front of a server, which a test can stop to simulate an outage."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.processes import LOOPBACK, held_port

_SERVER = re.compile(r"https://127\.0\.0\.1:([0-9]+)")


class Relay:
    """Passes TCP connections to one port of loopback on to another, while open."""

    def __init__(self, port: int, to: int) -> None:
        self._port, self._to = port, to
        self._server: asyncio.Server | None = None
        self._passing: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._pass, LOOPBACK, self._port)

    async def close(self) -> None:
        """Take no more connections, and cut those there are."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        passing = tuple(self._passing)
        for task in passing:
            task.cancel()
        await asyncio.gather(*passing, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._passing.add(task)
        try:
            if self._server is None:  # accepted in the last moment
                return
            there, back = await asyncio.open_connection(LOOPBACK, self._to)
            try:
                await asyncio.gather(_copy(reader, back), _copy(there, writer))
            finally:
                back.transport.abort()
        finally:
            writer.transport.abort()
            self._passing.discard(task)


async def _copy(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
    try:
        with suppress(OSError):
            while data := await source.read(65536):
                to.write(data)
                await to.drain()
    finally:
        to.close()


@asynccontextmanager
async def before_the_api_server(kubeconfig: Path, folder: Path) -> AsyncIterator[tuple[Relay, Path]]:
    """Yield a relay before the API server, not open yet, and a kubeconfig that goes through it."""
    written = await asyncio.to_thread(kubeconfig.read_text)
    server = _SERVER.search(written)
    if server is None:
        pytest.skip("the API server is not on loopback, so that no relay can stand before it")
    with held_port() as port:
        relay, through = Relay(port, int(server[1])), folder / "kubeconfig"
        through.write_text(_SERVER.sub(f"https://{LOOPBACK}:{port}", written))
        try:
            yield relay, through
        finally:
            await relay.close()
