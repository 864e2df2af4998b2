"""Controller process: health and metrics endpoints, and shutdown on signals."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

log = logging.getLogger(__name__)


def stop_requested() -> asyncio.Event:
    """Event that is set on SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def wait_until(stop: asyncio.Event, *working: "asyncio.Future[Any]") -> None:
    """Wait until stop is set or a task ends; raises the task's exception."""
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([stopping, *working], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    for work in working:
        if work.done():
            work.result()


@asynccontextmanager
async def serve_probes(
    health_port: int, metrics_port: int, registry: CollectorRegistry, failure: Callable[[], str] = str
) -> AsyncIterator[None]:
    """Serve /healthz and /metrics while the block runs; a health port of 0 uses any free port on loopback.

    `failure` returns why the process must be restarted; empty if healthy.
    """

    def health() -> web.Response:
        wrong = failure()
        return web.Response(status=503 if wrong else 200, text=wrong or "ok")

    def metrics() -> web.Response:
        return web.Response(body=generate_latest(registry), content_type="text/plain")

    async with _serve(health_port, "/healthz", health), _serve(metrics_port, "/metrics", metrics):
        yield


@asynccontextmanager
async def _serve(port: int, path: str, answer: Callable[[], web.Response]) -> AsyncIterator[None]:
    async def handle(_: web.Request) -> web.Response:
        return answer()

    app = web.Application()
    app.router.add_get(path, handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, None if port else "127.0.0.1", port).start()
    log.info("%s on port %d", path, int(runner.addresses[0][1]))
    try:
        yield
    finally:
        await runner.cleanup()
