"""Targets: a pipeline of `trimtab up` with and without its proxy, and a plain MLServer."""

import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cores import CORES, SERVER_CORE, pin, pin_threads
from benchmarks.overload.driving import SLO_SECONDS
from benchmarks.overload.generator import Speech
from benchmarks.router.parts import DELAY_SECONDS, SMALL_NUMBERS
from benchmarks.router.processes import ROOT, chained_mlservers, echo_pipeline, echo_plan
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.processes.parent_death import command_tied_to_parent

LARGE_BATCH, SMALL_BATCH = 128, 8
"""With the first the door and the router give out, with the second the model does."""
NEIGHBOURS = 2


@dataclass(frozen=True, slots=True)
class Target:
    """Where each speech is understood, and by which processes before the model servers."""

    ports: Mapping[Speech, int]
    fronts: Mapping[str, int] = field(default_factory=dict)


@asynccontextmanager
async def trimtab(batch_size: int, *, bounded: bool, one_core: bool = False) -> AsyncIterator[Target]:
    """Run the echo pipeline on the servers' core, behind its door or without one.

    The door may have any other core, the generator's among them; with `one_core` it is held to the servers' core too.
    Left to the system it stays for seconds on whichever core it woke on, since a generator that wakes 20,000 times a
    second looks busy to it: what was kept then told of that, not of the door.
    """
    pin(SERVER_CORE)
    pipeline = echo_pipeline(SMALL_NUMBERS, DELAY_SECONDS, SLO_SECONDS)
    with tempfile.TemporaryDirectory(prefix="trimtab-bench-") as name:
        folder = Path(name)
        write_json(folder / "pipeline.yaml", pipeline)
        plan = echo_plan(pipeline, batch_size, DELAY_SECONDS)
        setup = Setup(folder / "pipeline.yaml", folder / "run", plan=plan, proxy=bounded)
        async with Supervisor(setup) as local:
            await local.ready()
            if local.proxy is not None and not one_core:
                keep_off_servers(local.proxy.pid)
            fronts = {"router": local.router, "door": local.proxy}
            yield Target(
                {"http1": local.rest_port, "h2c": local.rest_port, "grpc": local.grpc_port},
                {name: front.pid for name, front in fronts.items() if front is not None},
            )


@asynccontextmanager
async def mlserver(batch_size: int, *, bounded: bool) -> AsyncIterator[Target]:
    """Run one plain MLServer with the same model and its own batching: one stage, so half of the work."""
    del bounded  # it has no bounds
    model = {"max_batch_size": batch_size, "max_batch_time": DELAY_SECONDS}
    async with chained_mlservers({}, model, DELAY_SECONDS) as plain:
        yield Target({"grpc": plain.grpc_ports[0]})


def keep_off_servers(process: int) -> None:
    """Let a process and all its threads run on any core but the servers'."""
    pin_threads(process, CORES - {SERVER_CORE} or CORES)


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Keep the servers' core busy: each neighbour in a session of its own weighs as much as one of the servers.

    They die with this process, however it ends: nobody else would ever end them.
    """
    pin(SERVER_CORE)
    command = command_tied_to_parent("benchmarks.overload.neighbour")
    busy = [subprocess.Popen(command, start_new_session=True, cwd=ROOT) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
