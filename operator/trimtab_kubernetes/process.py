"""Shell: what the process of every controller does: it answers probes and Prometheus, and ends when it is told to."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

log = logging.getLogger(__name__)


def told_to_stop() -> asyncio.Event:
    """Return what is set by SIGTERM or SIGINT from now on."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def until(stop: asyncio.Event, *working: "asyncio.Future[Any]") -> None:
    """Wait until told to stop, or until some work ends by itself; raises what that raised."""
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([stopping, *working], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    for work in working:
        if work.done():
            work.result()


@asynccontextmanager
async def answering(port: int, path: str, answer: Callable[[], web.Response]) -> AsyncIterator[int]:
    """Answer one path while the block runs, on all addresses, or on loopback where any free port will do."""

    async def handle(_: web.Request) -> web.Response:
        return answer()

    app = web.Application()
    app.router.add_get(path, handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, None if port else "127.0.0.1", port).start()
    found = int(runner.addresses[0][1])
    log.info("%s on port %d", path, found)
    try:
        yield found
    finally:
        await runner.cleanup()
