"""Shell: the adapter as a pod. Waits its turn to lead, plans, and answers probes and Prometheus."""

import argparse
import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
from aiohttp import web

from trimtab_adapter.cluster.fleet import Fleet, Surroundings
from trimtab_adapter.cluster.lease import Leadership
from trimtab_adapter.forecasting import TrainedWeights
from trimtab_adapter.metrics import AdapterMetrics
from trimtab_adapter.prometheus import Server, trust
from trimtab_kubernetes import Cluster, ClusterError
from trimtab_kubernetes.client import own_namespace
from trimtab_pipelines.documents import DocumentError, load_pools

log = logging.getLogger(__name__)

HTTP_TIMEOUT_SECONDS = 2.0
PROMETHEUS_TIMEOUT_SECONDS = 5.0


async def adapt_cluster(options: argparse.Namespace) -> str:
    """Plan until SIGTERM or SIGINT; returns why it cannot, or nothing."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        cluster = await Cluster.connect()
    except ClusterError as error:
        return str(error)
    leadership = Leadership(cluster, own_namespace(), os.environ.get("POD_NAME") or socket.gethostname())
    try:
        await take_part(options, cluster, leadership, stop)
    except DocumentError as error:  # the files of pools and of certificates
        return str(error)
    return ""


async def take_part(options: argparse.Namespace, cluster: Cluster, leadership: Leadership, stop: asyncio.Event) -> None:
    """Lead whenever it is our turn; closes the connection to the cluster at the end."""
    metrics, fleets = AdapterMetrics(), list[Fleet]()
    async with (
        cluster,
        httpx.AsyncClient(timeout=HTTP_TIMEOUT_SECONDS, trust_env=False) as routers,
        httpx.AsyncClient(
            timeout=PROMETHEUS_TIMEOUT_SECONDS, trust_env=False, verify=trust(options.prometheus_ca)
        ) as asking,
        serving(options.health_port, "/healthz", lambda: _health(fleets)),
        serving(
            options.metrics_port, "/metrics", lambda: web.Response(body=metrics.expose(), content_type="text/plain")
        ),
    ):
        prometheus = None
        if options.prometheus is not None:
            prometheus = Server(asking, options.prometheus, options.prometheus_token_file)
        pools = None if options.pools is None else load_pools(options.pools).pools
        around = Surroundings(cluster, routers, prometheus, TrainedWeights(options.weights), metrics, pools)
        namespaces = [name for name in options.namespaces.split(",") if name]
        while await leadership.acquire(stop):
            fleet = Fleet(around, namespaces)
            fleets[:] = [fleet]
            await _lead(fleet, leadership, stop)
            fleets.clear()
        await leadership.release()


async def _lead(fleet: Fleet, leadership: Leadership, stop: asyncio.Event) -> None:
    """Plan until told to stop or somebody else leads."""
    enough = asyncio.Event()
    running = asyncio.create_task(fleet.run(enough))
    holding = asyncio.create_task(leadership.hold(stop))
    await asyncio.wait([running, holding], return_when=asyncio.FIRST_COMPLETED)
    enough.set()
    holding.cancel()
    await running


@asynccontextmanager
async def serving(port: int, path: str, answer: Callable[[], web.Response]) -> AsyncIterator[int]:
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


def _exposed(metrics: AdapterMetrics) -> web.Response:
    return web.Response(body=metrics.expose(), content_type="text/plain")


def _health(fleets: list[Fleet]) -> web.Response:
    """Well while every loop ticks, and while another adapter leads."""
    late = [name for fleet in fleets for name in fleet.late()]
    if not late:
        return web.Response(text="ok")
    return web.Response(status=503, text=f"no tick for three intervals: {', '.join(late[:10])}")
