"""Target of the overload benchmark: an echo pipeline, and processes that slow its core."""

import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.processors import CORES, SERVER_CORE, pin, pin_threads
from benchmarks.overload.driver import SLO_SECONDS
from benchmarks.overload.generator import Protocol
from benchmarks.router.parts import DELAY_SECONDS, SMALL_NUMBERS
from benchmarks.router.processes import echo_pipeline, echo_plan
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_pipelines.documents import write_json

ROUTER_BOUND_BATCH, MODEL_BOUND_BATCH = 128, 8
"""Batch sizes with which the router, or the model, is the bottleneck."""
NEIGHBOURS = 2


@dataclass(frozen=True, slots=True)
class Target:
    """A target's port by protocol, and the processes in front of its model servers."""

    ports: Mapping[Protocol, int]
    fronts: Mapping[str, int] = field(default_factory=dict)


@asynccontextmanager
async def serve_echo(batch_size: int) -> AsyncIterator[Target]:
    """Run the echo pipeline on the servers' core, behind its proxy, which may use every other core.

    Left to the kernel, the proxy stays for seconds on the core where it woke up, because a generator that wakes 20,000
    times per second counts as busy; the goodput would then depend on that core.
    """
    pin(SERVER_CORE)
    pipeline = echo_pipeline(SMALL_NUMBERS, DELAY_SECONDS, SLO_SECONDS)
    with tempfile.TemporaryDirectory(prefix="trimtab-bench-") as name:
        folder = Path(name)
        write_json(folder / "pipeline.yaml", pipeline)
        plan = echo_plan(pipeline, batch_size, DELAY_SECONDS)
        async with Supervisor(Setup(folder / "pipeline.yaml", folder / "run", plan=plan)) as local:
            await local.ready()
            if local.proxy is not None:
                keep_off_servers(local.proxy.pid)
            fronts = {"router": local.router, "proxy": local.proxy}
            yield Target(
                {"http1": local.rest_port, "h2c": local.rest_port, "grpc": local.grpc_port},
                {name: front.pid for name, front in fronts.items() if front is not None},
            )


def keep_off_servers(pid: int) -> None:
    """Let all threads of a process run on any core but the servers'."""
    pin_threads(pid, CORES - {SERVER_CORE} or CORES)


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Keep the servers' core busy with processes in sessions of their own, which the kernel weighs like one server."""
    pin(SERVER_CORE)
    # The loop ends by itself if this process dies.
    loop = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
    busy = [subprocess.Popen([sys.executable, "-c", loop], start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
