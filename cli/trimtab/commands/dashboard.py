"""`trimtab dashboard`: serves the live page of a run folder, of a remote router, or of a pipeline in a cluster."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from trimtab import run_record
from trimtab.kubernetes_access import PIPELINE, connected, get_pipeline, namespaced_name
from trimtab.local.router_client import RouterClient
from trimtab.options import LIVE_PAGE_PORT, NamespaceOption, PagePortOption, console, parse_address
from trimtab.remote_recorder import Connect, RemoteRecorder, Routers, cluster_routers
from trimtab.report.live_page import LivePage, PageError
from trimtab.run_folder import RunFolder
from trimtab_loadtester.load_spec import LoadError
from trimtab_pipelines.documents import load_pipeline, parse
from trimtab_pipelines.processes.child_process import StartError
from trimtab_pipelines.spec import InferencePipeline


def command(
    source: Annotated[
        Path,
        typer.Argument(metavar="FOLDER|PIPELINE", help="Run folder or, with --address or --in-cluster, the pipeline"),
    ],
    address: Annotated[str | None, typer.Option("--address", help="HOST:PORT of a router's admin port")] = None,
    page_port: PagePortOption = LIVE_PAGE_PORT,
    *,
    in_cluster: Annotated[
        bool, typer.Option("--in-cluster", help="Show a pipeline of the cluster; PIPELINE may be a name")
    ] = False,
    namespace: NamespaceOption = None,
) -> int:
    """Serve the live page of a run: load, plans, drops, accuracy and every stage.

    Ctrl-C ends it.
    """
    if address is not None and in_cluster:
        raise LoadError("give --address or --in-cluster, not both")
    if in_cluster:
        serving = _serve_remote(partial(_cluster_routers, *namespaced_name(source, namespace)), page_port)
    elif address is not None:
        serving = _serve_remote(partial(_router_at, address, load_pipeline(source)), page_port)
    else:
        run_record.load(source, 1)  # raises DocumentError if it is no run folder
        serving = _serve(source, page_port)
    asyncio.run(serving)
    return 0


async def _serve(folder: Path, port: int) -> None:
    page = LivePage(folder, port)
    try:
        await page.start()
    except PageError as error:
        raise StartError(str(error)) from error
    console.print(f"live page: {page.url}")
    try:
        await asyncio.Event().wait()
    finally:
        await page.stop()


@asynccontextmanager
async def _router_at(address: str, pipeline: InferencePipeline) -> AsyncIterator[Routers]:
    host, port = parse_address(address)
    router = RouterClient(port, host)
    try:
        yield pipeline, [router], None
    finally:
        await router.close()


@asynccontextmanager
async def _cluster_routers(namespace: str, name: str) -> AsyncIterator[Routers]:
    async with connected() as cluster:
        document = await get_pipeline(cluster, namespace, name)
    pipeline = parse(InferencePipeline, document, f"{PIPELINE} {namespace}/{name}")
    async with cluster_routers(namespace, name) as (routers, fetch_plan):
        yield pipeline, routers, fetch_plan


async def _serve_remote(connect: Connect, port: int) -> None:
    """Record routers into a temporary folder, and serve its live page."""
    with RunFolder() as folder:
        async with connect() as (pipeline, routers, fetch_plan):  # raises an error that the user can act on
            recorder = run_record.Recorder(folder, pipeline.name, pipeline)
            recorder.start(None)
            remote = RemoteRecorder(recorder)
            await remote.sample_once(routers, fetch_plan)
        recording = asyncio.create_task(remote.run(connect))
        try:
            await _serve(folder, port)
        finally:
            recording.cancel()
            await asyncio.gather(recording, return_exceptions=True)
