"""`trimtab dashboard`: the live page of a run's folder, of a router that runs elsewhere, or of a pipeline in a cluster."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from trimtab import run_record
from trimtab.kubernetes_access import PIPELINE, connected
from trimtab.local.router_client import RouterClient
from trimtab.options import LIVE_PAGE_PORT, NamespaceOption, PagePortOption, console, parse_address
from trimtab.plan_inputs import namespaced_name
from trimtab.remote_recorder import Reach, RemoteRecorder, Routers, cluster_routers
from trimtab.report.live_page import LivePage, PageError
from trimtab.run_folder import RunFolder
from trimtab_loadtester.load_spec import LoadError
from trimtab_pipelines.documents import load_pipeline, parse
from trimtab_pipelines.processes.child_process import StartError
from trimtab_pipelines.spec import InferencePipeline


def command(
    what: Annotated[
        Path,
        typer.Argument(metavar="FOLDER|PIPELINE", help="Folder of a run; with --address or --in-cluster the pipeline"),
    ],
    address: Annotated[
        str | None, typer.Option("--address", help="HOST:PORT of a router's administrative port")
    ] = None,
    page_port: PagePortOption = LIVE_PAGE_PORT,
    *,
    in_cluster: Annotated[
        bool, typer.Option("--in-cluster", help="Show the pipeline of that name, or of that file, in the cluster")
    ] = False,
    namespace: NamespaceOption = None,
) -> int:
    """Serve the page that shows a run while it goes on: what comes, what runs and why, drops, accuracy, each stage.

    Ctrl-C ends it.
    """
    if address is not None and in_cluster:
        raise LoadError("give --address or --in-cluster, not both")
    if in_cluster:
        showing = _watched(partial(_in_cluster, *namespaced_name(what, namespace)), page_port)
    elif address is not None:
        showing = _watched(partial(_at, address, load_pipeline(what)), page_port)
    else:
        run_record.load(what, 1)  # or say what is missing
        showing = _shown(what, page_port)
    asyncio.run(showing)
    return 0


async def _shown(folder: Path, port: int) -> None:
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
async def _at(address: str, pipeline: InferencePipeline) -> AsyncIterator[Routers]:
    host, port = parse_address(address)
    router = RouterClient(port, host)
    try:
        yield pipeline, [router], None
    finally:
        await router.close()


@asynccontextmanager
async def _in_cluster(namespace: str, name: str) -> AsyncIterator[Routers]:
    async with connected() as cluster:
        found = await cluster.get(PIPELINE, namespace, name)
    if found is None:
        raise StartError(f"no {PIPELINE} {namespace}/{name} in this cluster; see kubectl get ipl -A")
    pipeline = parse(InferencePipeline, found, f"{PIPELINE} {namespace}/{name}")
    async with cluster_routers(namespace, name) as (routers, newest_plan):
        yield pipeline, routers, newest_plan


async def _watched(reach: Reach, port: int) -> None:
    """Keep a record of routers in a temporary folder, and show it."""
    with RunFolder() as folder:
        async with reach() as (pipeline, routers, newest_plan):  # or say what is wrong
            recorder = run_record.Recorder(folder, pipeline.name, pipeline)
            recorder.start(None)
            watching = RemoteRecorder(recorder)
            await watching.sample_once(routers, newest_plan)
        recording = asyncio.create_task(watching.run(reach))
        try:
            await _shown(folder, port)
        finally:
            recording.cancel()
            await asyncio.gather(recording, return_exceptions=True)
