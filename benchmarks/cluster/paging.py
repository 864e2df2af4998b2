"""The live page of a pipeline in the cluster, by the one command that a user types."""

import asyncio
import os
import sys

import httpx

from benchmarks.cluster.observing import NotYetError, Watched, until
from benchmarks.cluster.setting import TOOLS, CommandError
from tests.local_run import charts_of

SHOWN_SECONDS = 30.0
_TOLD = "live page: "


async def charts_shown(watched: Watched) -> int:
    """How many charts `trimtab dashboard NAME --in-cluster` draws of a pipeline that serves; 0 where it says nothing.

    Raises:
        CommandError: it ended instead; the message is what it said.
    """
    setting = watched.setting
    command = ("-m", "trimtab", "dashboard", watched.name, "--in-cluster", "--namespace", setting.namespace)
    path = os.pathsep.join((str(TOOLS), os.environ.get("PATH", "")))
    page = await asyncio.create_subprocess_exec(
        *(sys.executable, *command, "--page-port", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"KUBECONFIG": str(setting.kubeconfig), "PATH": path, "PYTHONUNBUFFERED": "1"},
    )
    try:
        async with asyncio.timeout(SHOWN_SECONDS), httpx.AsyncClient() as client:
            url = await _told(page)
            shown = await until(lambda: _charts(client, url), "a chart", SHOWN_SECONDS)
            return int(shown)
    except (TimeoutError, NotYetError):
        return 0
    finally:
        if page.returncode is None:
            page.terminate()
        await page.wait()


async def _told(page: asyncio.subprocess.Process) -> str:
    said = []
    while page.stdout is not None and (line := await page.stdout.readline()):
        said.append(line.decode().strip())
        if said[-1].startswith(_TOLD):
            return said[-1].removeprefix(_TOLD)
    raise CommandError(f"trimtab dashboard ended: {' '.join(said)}")


async def _charts(client: httpx.AsyncClient, url: str) -> int:
    return len(charts_of((await client.get(url)).text))
