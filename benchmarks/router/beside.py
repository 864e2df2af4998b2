"""`python -m benchmarks.router.beside BEFORE`: what a request costs this router, and that of another commit beside it.

BEFORE is a checkout of the other commit (`git worktree add BEFORE COMMIT`). Both routers, each with its door, serve the
same model servers on one core, and take turns at the same load from the other. Compared is the processor time of the
router's own process for each request answered well; the bar is on the median of the ratios of neighbouring turns.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from benchmarks.cores import CLIENT_CORE, SERVER_CORE, pin
from benchmarks.router.clients import grpc_client, rest_client
from benchmarks.router.drive import Tally, closed_loop
from benchmarks.router.parts import BATCH_SIZE, LONG_SLO_SECONDS, SMALL_NUMBERS
from benchmarks.router.processes import (
    ROOT,
    START_SECONDS,
    STOP_SECONDS,
    Served,
    echo_pipeline,
    echo_plan,
    endpoints_of,
    free_port,
    served,
    until_ready,
)
from trimtab.app import run_reporting_errors
from trimtab_pipelines.processes.child_process import RouterPorts
from trimtab_pipelines.result_line import ResultLine, threshold
from trimtab_protocol import event_loop

TURN_SECONDS = 2.0
MOST_RATIO = 1.05
LOADS = {f"{name} {callers}": (name, callers) for name in ("rest", "grpc") for callers in (1, 8, 64)}
CLIENTS = {"rest": rest_client, "grpc": grpc_client}


def main() -> int:
    """Compare; the exit code is 0 where every bar holds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router.beside", description=__doc__)
    parser.add_argument("before", type=Path, help="a checkout of the other commit")
    parser.add_argument("--turns", type=int, default=6, help="of each router at each load")
    given = parser.parse_args()
    pin(CLIENT_CORE)
    with asyncio.Runner(loop_factory=event_loop.new_event_loop) as runner:
        outcome = runner.run(compare(given.before.resolve(), given.turns))
    outcome.print()
    return 0 if outcome.holds else 1


async def compare(before: Path, turns: int) -> ResultLine:
    """Let both serve in turns."""
    pipeline = echo_pipeline(SMALL_NUMBERS, 0.0, LONG_SLO_SECONDS)
    figures: dict[str, float | int | str | None] = {}
    bars = []
    async with AsyncExitStack() as stack:
        replicas = await stack.enter_async_context(served(pipeline, BATCH_SIZE, 0.0, door=False))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trimtab-")))
        documents = {
            "pipeline.yaml": pipeline,
            "plan.json": echo_plan(pipeline, BATCH_SIZE, 0.0),
            "endpoints.json": endpoints_of(replicas.data_ports),
        }
        for name, document in documents.items():  # only what was said, since the other commit may know fewer fields
            (folder / name).write_text(document.model_dump_json(by_alias=True, exclude_unset=True))
        trees = (before, ROOT)
        routers = [await stack.enter_async_context(_router_of(tree, folder, replicas)) for tree in trees]
        for load, (wire, callers) in LOADS.items():
            pairs = [[await _cost(router, wire, callers) for router in routers] for _ in range(turns)]
            ratio = statistics.median(new / old for old, new in pairs)
            for name, side in zip(("before", "now"), zip(*pairs, strict=True), strict=True):
                figures[f"{load}: {name}, microseconds"] = round(1e6 * statistics.median(side), 1)
            bars.append(
                threshold(f"{load} at once: processor time of a request, now over before", ratio, "<=", MOST_RATIO)
            )
            sys.stderr.write(f"{load}: {ratio:.3f}\n")
    return ResultLine(name="bench-router-beside", figures=figures, bars=tuple(bars))


async def _cost(router: Served, wire: str, callers: int) -> float:
    """Seconds of processor time that a request takes in the router's own process."""
    async with CLIENTS[wire](router, SMALL_NUMBERS) as send:
        tally: Tally = await closed_loop(send, callers, TURN_SECONDS, (router.router,), warmup_seconds=0.5)
    if set(tally.codes) != {"ok"}:
        raise RuntimeError(f"not all was answered well: {dict(tally.codes)}")
    return tally.cpu_seconds / tally.codes["ok"]


@asynccontextmanager
async def _router_of(tree: Path, folder: Path, replicas: Served) -> AsyncIterator[Served]:
    """Run a tree's router and door before model servers that run already."""
    async with AsyncExitStack() as stack:
        sockets = f"--sockets={stack.enter_context(tempfile.TemporaryDirectory(prefix='trimtab-'))}"
        files = [f"--pipeline={folder / 'pipeline.yaml'}", f"--plan={folder / 'plan.json'}"]
        files.append(f"--endpoints={folder / 'endpoints.json'}")
        router = await _start(stack, tree, "trimtab_router", *files, sockets)
        if router.stdout is None:
            raise RuntimeError("the router's output cannot be read")
        async with asyncio.timeout(START_SECONDS):
            ports = RouterPorts(**json.loads(await router.stdout.readline()))
        await until_ready(ports.admin_port)
        rest_port, grpc_port = free_port(), free_port()
        told = [f"--rest-port={rest_port}", f"--grpc-port={grpc_port}"]
        await _start(stack, tree, "trimtab_router.envoy", files[0], sockets, *told)
        await until_ready(rest_port)
        yield replace(replicas, rest_port=rest_port, grpc_port=grpc_port, router=router.pid)


async def _start(stack: AsyncExitStack, tree: Path, module: str, *arguments: str) -> asyncio.subprocess.Process:
    """Run a tree's own module on the servers' core until the stack is left."""
    pin(SERVER_CORE)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=None if module == "trimtab_router" else asyncio.subprocess.DEVNULL,  # Envoy tells much
        env={**os.environ, "PYTHONPATH": _packages(tree), "PYTHONSAFEPATH": "1"},
    )
    pin(CLIENT_CORE)
    stack.push_async_callback(_stop, process)
    return process


def _packages(tree: Path) -> str:
    """The folders of a tree's packages, as a search path."""
    return os.pathsep.join(sorted(str(found.parent) for found in tree.glob("*/trimtab*/")))


async def _stop(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    async with asyncio.timeout(STOP_SECONDS):
        await process.wait()


if __name__ == "__main__":
    sys.exit(run_reporting_errors(main))
