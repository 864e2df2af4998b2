"""Shell: the report of a run as a page that grows while it goes on, read from the run's folder when somebody looks."""

import asyncio
import math
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from trimtab import run_record
from trimtab.run_samples import Run
from trimtab_pipelines.documents import DocumentError

HOST = "127.0.0.1"
MOST_SHOWN = 300
"""Samples that one look reads: the newest half of them, and the others from all before."""
MOST_DECISIONS_SHOWN = 60
"""Decisions, likewise: each takes as much memory as some dozens of samples, and comes after five of them."""
LEAST_SECONDS_BETWEEN = 1.0
ASKED_EVERY_SECONDS = 2.0
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; "
    "script-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; frame-ancestors 'none'",
}


class PageError(Exception):
    """The page cannot be served; the message says why, and what would be right."""


@dataclass(slots=True)
class LivePage:
    """The page of the run in a folder, on a port of this machine alone.

    It is made by a thread of its own: others would each keep in their heap what a look takes.
    """

    folder: Path
    port: int
    final: Run | None = None
    _runner: web.AppRunner | None = None
    _body: Mapping[str, Any] = field(default_factory=dict)
    _made_at: float = -math.inf
    _asked_at: float = -math.inf
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "page"))
    _making: asyncio.Lock = field(default_factory=asyncio.Lock)
    _told_final: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://{HOST}:{self.port}/"

    async def start(self) -> None:
        """Serve it; port 0 becomes a free one. Raises PageError where the port is taken."""
        app = web.Application(middlewares=[_from_here])
        app.add_routes([web.get("/", self._page), web.get("/parts", self._parts), web.get("/plotly.js", _plotly)])
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, self.port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            self._runner = None
            raise PageError(f"port {self.port} is taken ({error.strerror}); --page-port gives another") from error
        self.port = int(self._runner.addresses[0][1])

    async def finish(self, run: Run) -> None:
        """Show the finished run to who still looks, and stop."""
        self.final = run
        if time.monotonic() - self._asked_at < 2 * ASKED_EVERY_SECONDS:
            try:
                async with asyncio.timeout(2 * ASKED_EVERY_SECONDS):
                    await self._told_final.wait()
            except TimeoutError:
                pass
        await self.stop()

    async def stop(self) -> None:
        """Stop serving it."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        self._thread.shutdown(wait=False)

    async def _page(self, _: web.Request) -> web.Response:
        from trimtab.report.html_page import live_page  # noqa: PLC0415  (plotly, only once somebody looks)

        return web.Response(text=live_page("Trimtab"), content_type="text/html", headers=HEADERS)

    async def _parts(self, _: web.Request) -> web.Response:
        self._asked_at = time.monotonic()
        final = self.final
        async with self._making:
            if final is not None or time.monotonic() - self._made_at > LEAST_SECONDS_BETWEEN:
                try:
                    self._body = await asyncio.get_running_loop().run_in_executor(
                        self._thread, _seen, self.folder, final
                    )
                except DocumentError:
                    return web.Response(status=503, text="nothing is recorded yet", headers=HEADERS)
                self._made_at = time.monotonic()
        answer = web.json_response(self._body, headers=HEADERS)
        if final is not None:
            self._told_final.set()
        return answer


@web.middleware
async def _from_here(request: web.Request, handler: Any) -> web.StreamResponse:
    """Refuse who came by another name: a page elsewhere whose name was made to lead here."""
    name = request.host.rpartition(":")[0] or request.host
    if name not in {HOST, "localhost"}:
        return web.Response(status=403, text=f"this page is served as {HOST} or localhost alone", headers=HEADERS)
    answer: web.StreamResponse = await handler(request)
    return answer


async def _plotly(_: web.Request) -> web.Response:
    from plotly.offline import get_plotlyjs  # noqa: PLC0415  (4 MB, only once somebody looks)

    headers = {**HEADERS, "Cache-Control": "max-age=86400"}
    return web.Response(text=get_plotlyjs(), content_type="text/javascript", headers=headers)


def _seen(folder: Path, final: Run | None) -> dict[str, Any]:
    """What the page shows of a run now; raises DocumentError before there is a sample. Blocks: it runs on a thread."""
    from trimtab.report import html_page, page, series  # noqa: PLC0415  (plotly)

    run = final or run_record.load(folder, MOST_SHOWN, MOST_DECISIONS_SHOWN)
    if final is None and not run.samples:
        raise DocumentError(f"{folder} has no sample yet")
    drawn: html_page.Charts = {}
    shown = page.parts([run], drawn)
    finished, title = final is not None, f"{run.title} · Trimtab"
    return {
        "title": title,
        "parts": shown,
        "charts": html_page.plain(drawn),
        "finished": finished,
        "seconds": round(series.seconds(run), 1),
    }
