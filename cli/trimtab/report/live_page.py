"""Server of the live page: the report of a run, rendered from the run folder at each request."""

import asyncio
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from trimtab import run_record
from trimtab.run_samples import Run
from trimtab_pipelines.documents import DocumentError
from trimtab_protocol.host_check import HostCheck

HOST = "127.0.0.1"
_HOST_CHECK = HostCheck.at(HOST)
MAX_SAMPLES = 300
"""Maximum of samples on the page: half of them the newest, the others thinned."""
MAX_PLANS = 60
"""Maximum of plans: one takes as much memory as dozens of samples, and there is one for five samples."""
MIN_RENDER_SECONDS = 1.0
REFRESH_SECONDS = 2.0
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; "
    "script-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; frame-ancestors 'none'",
}


class PageError(Exception):
    """The page cannot be served."""


@dataclass(slots=True)
class LivePage:
    """Live page of the run in a folder, on a port of the loopback interface.

    A single thread renders it: with several, each would keep a rendering's memory in its own heap.
    """

    folder: Path
    port: int
    final: Run | None = None
    _runner: web.AppRunner | None = None
    _html: str = ""
    _rendered_at: float = -math.inf
    _requested_at: float = -math.inf
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "page"))
    _rendering: asyncio.Lock = field(default_factory=asyncio.Lock)
    _final_sent: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/"

    async def start(self) -> None:
        """Serve the page; port 0 becomes a free one. Raises PageError if the port is taken."""
        app = web.Application(middlewares=[_require_local_host])
        app.add_routes([web.get("/", self._page), web.get("/plotly.js", _plotly)])
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, self.port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            self._runner = None
            raise PageError(f"port {self.port} is taken ({error.strerror}); choose another by --page-port") from error
        self.port = int(self._runner.addresses[0][1])

    async def finish(self, run: Run) -> None:
        """Serve the finished run to an open page, then stop."""
        self.final = run
        if time.monotonic() - self._requested_at < 2 * REFRESH_SECONDS:
            try:
                async with asyncio.timeout(2 * REFRESH_SECONDS):
                    await self._final_sent.wait()
            except TimeoutError:
                pass
        await self.stop()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        self._thread.shutdown(wait=False)

    async def _page(self, _: web.Request) -> web.Response:
        self._requested_at = time.monotonic()
        final = self.final
        async with self._rendering:
            if final is not None or time.monotonic() - self._rendered_at > MIN_RENDER_SECONDS:
                loop = asyncio.get_running_loop()
                self._html = await loop.run_in_executor(self._thread, _render, self.folder, final)
                self._rendered_at = time.monotonic()
        if final is not None:
            self._final_sent.set()
        return web.Response(text=self._html, content_type="text/html", headers=HEADERS)


@web.middleware
async def _require_local_host(request: web.Request, handler: Any) -> web.StreamResponse:
    if not _HOST_CHECK.accepts(request.headers):
        return web.Response(status=403, text=f"this page is only served as {HOST} or localhost", headers=HEADERS)
    response: web.StreamResponse = await handler(request)
    return response


async def _plotly(_: web.Request) -> web.Response:
    from plotly.offline import get_plotlyjs  # noqa: PLC0415  (4 MB, needed only once the page is opened)

    headers = {**HEADERS, "Cache-Control": "max-age=86400"}
    return web.Response(text=get_plotlyjs(), content_type="text/javascript", headers=headers)


def _render(folder: Path, final: Run | None) -> str:
    """Render the page of a run. Blocking."""
    from trimtab.report.page import render  # noqa: PLC0415  (imports plotly)

    try:
        run = final or run_record.load(folder, MAX_SAMPLES, MAX_PLANS)
    except DocumentError:
        run = None
    recorded = run is not None and (final is not None or bool(run.samples))
    return render([run] if run is not None and recorded else [], "live" if final is None else "finished")
