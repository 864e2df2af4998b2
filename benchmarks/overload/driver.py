"""Driver of the overload benchmark: its target, the load generator's process, neighbours, and CPU usage.

The generator finds the target's maximum goodput and offers multiples of it. Neighbours slow the servers' core.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.harness.processors import CLIENT_CORE, CORES, SERVER_CORE, pin, pin_threads
from benchmarks.overload.generator import Offer, Protocol
from benchmarks.overload.outcomes import OfferSummary
from benchmarks.router.parts import DELAY_SECONDS, SMALL_NUMBERS
from benchmarks.router.processes import ROOT, echo_pipeline, echo_plan
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.processes.parent_death import command_tied_to_parent

FIRST_RPS, GROWTH, MAX_RPS = 200.0, 1.4, 20_000.0
STEP_SECONDS = 3.0
SUSTAINED_SHARE = 0.85
"""A step with less than this share of its requests in time is beyond the maximum."""
STEPS_BEYOND = 2
RECHECKED_SHARES = (0.85, 1.0, 1.2)
"""Of an earlier maximum: the loads offered to find what it is now."""
SLO_SECONDS = 0.5
ROUTER_BOUND_BATCH, MODEL_BOUND_BATCH = 128, 8
"""Batch sizes with which the router, or the model, is the bottleneck."""
NEIGHBOURS = 2
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_IDLE, _IOWAIT = 3, 4


@dataclass(frozen=True, slots=True)
class Case:
    """A protocol over a number of connections."""

    name: str
    protocol: Protocol
    connections: int


# An HTTP/1.1 connection carries one request at a time, so eight of them cannot overload the target.
REST_FEW = Case("rest, 8 connections (h2c)", "h2c", 8)
REST_MANY = Case("rest, 1,024 connections", "http1", 1024)
GRPC_FEW = Case("grpc, 8 connections", "grpc", 8)
GRPC_MANY = Case("grpc, 256 connections", "grpc", 256)


class Generator:
    """The generator's process, on a core of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def offer(self, case: Case, port: int, rate_rps: float, seconds: float) -> OfferSummary:
        """Offer a rate and wait for its summary."""
        offer = Offer(case.protocol, port, case.connections, rate_rps, seconds, SLO_SECONDS)
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the generator has no pipes")
        self._process.stdin.write(json.dumps(dataclasses.asdict(offer)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the generator ended with exit code {self._process.wait()}")
        return OfferSummary(**json.loads(line))

    def max_goodput_rps(self, case: Case, port: int) -> float:
        """Raise the rate until two steps are beyond the maximum; return the best goodput."""
        self.offer(case, port, FIRST_RPS, 1.0)  # warm-up
        rate, beyond, best = FIRST_RPS, 0, 0.0
        while beyond < STEPS_BEYOND and rate <= MAX_RPS:
            goodput = self.offer(case, port, rate, STEP_SECONDS).goodput_rps
            beyond += goodput < SUSTAINED_SHARE * rate
            best = max(best, goodput)
            rate *= GROWTH
        return best

    def recheck_max_goodput_rps(self, case: Case, port: int, around_rps: float) -> float:
        """Measure the maximum again around an earlier one, since the machine's speed changes."""
        return max(self.offer(case, port, share * around_rps, STEP_SECONDS).goodput_rps for share in RECHECKED_SHARES)


@contextmanager
def generator() -> Iterator[Generator]:
    command = command_tied_to_parent("benchmarks.overload.generator", str(CLIENT_CORE))
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with process:
        try:
            yield Generator(process)
        finally:
            process.kill()


@dataclass(slots=True)
class CpuUsage:
    """CPU usage during a block, filled when it ends."""

    others_share: float = 0.0
    """Share of the servers' core that other processes than ours used."""
    shares: dict[str, float] = field(default_factory=dict)
    """Cores used by each named process."""


@contextmanager
def watch_cpu(generator_pid: int, processes: Mapping[str, int]) -> Iterator[CpuUsage]:
    """Measure CPU usage. All children but the generator run on the servers' core."""
    usage, pids = CpuUsage(), {"generator": generator_pid, **processes}
    began, busy, ours = time.monotonic(), _busy_seconds(), _own_seconds(generator_pid)
    before = {name: _cpu_seconds(psutil.Process(pid)) for name, pid in pids.items()}
    yield usage
    wall_seconds = time.monotonic() - began
    others_seconds = _busy_seconds() - busy - (_own_seconds(generator_pid) - ours)
    usage.others_share = round(max(others_seconds / wall_seconds, 0.0), 2)
    usage.shares = {
        name: round((_cpu_seconds(psutil.Process(pid)) - before[name]) / wall_seconds, 2) for name, pid in pids.items()
    }


def _busy_seconds() -> float:
    lines = Path("/proc/stat").read_text().splitlines()
    core = next(line for line in lines if line.startswith(f"cpu{SERVER_CORE} "))
    ticks = [int(number) for number in core.split()[1:]]
    return (sum(ticks[:8]) - ticks[_IDLE] - ticks[_IOWAIT]) / _TICKS_PER_SECOND


def _own_seconds(generator_pid: int) -> float:
    me = psutil.Process()
    own = (process for process in (me, *me.children(recursive=True)) if process.pid != generator_pid)
    return sum(map(_cpu_seconds, own))


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


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
