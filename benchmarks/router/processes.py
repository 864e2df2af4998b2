"""Processes under measurement, on one core: model servers, router, proxy, and plain MLServers."""

import asyncio
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.harness.processors import CLIENT_CORE, SERVER_CORE, pin
from trimtab_model_servers.server.settings import write_model_folder
from trimtab_pipelines.endpoints import Endpoints
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.processes.child_process import ChildProcess, ReplicaPorts, RouterPorts
from trimtab_pipelines.processes.parent_death import EXEC
from trimtab_pipelines.spec import InferencePipeline

STAGES = ("first", "second")
START_SECONDS, STOP_SECONDS = 120.0, 15.0
ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds so far and peak resident bytes of processes."""

    cpu_seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Served:
    """A running pipeline, or plain MLServers, whose gRPC ports are `data_ports`; absent ports and processes are 0.

    `fronts` are the router and its proxy, if it has one.
    """

    rest_port: int
    grpc_port: int
    data_ports: tuple[int, ...]
    router: int
    fronts: tuple[int, ...]
    servers: tuple[int, ...]

    @property
    def processes(self) -> tuple[int, ...]:
        return (*self.fronts, *self.servers)


def usage(processes: Sequence[int]) -> Usage:
    """Sum the usage of processes and their children."""
    cpu_seconds, peak_bytes = 0.0, 0
    roots = [psutil.Process(pid) for pid in processes]
    for process in [*roots, *(child for root in roots for child in root.children(recursive=True))]:
        times = process.cpu_times()
        cpu_seconds += times.user + times.system
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak_bytes += next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024
    return Usage(cpu_seconds, peak_bytes)


def echo_pipeline(numbers: int, delay_seconds: float, slo_seconds: float) -> InferencePipeline:
    """Two stages of y = x + 1 over rows of FP32 numbers."""
    outputs = [{"name": "y", "datatype": "FP32", "shape": [numbers]}]
    model = {"name": "echo", "family": "echo", "storageUri": "random://?seed=0", "accuracy": 1.0}
    variants = [model | {"parameters": {"delay_seconds": delay_seconds}}]
    stages = [
        {"name": name, "inputs": [{"name": "x", "from": source}], "outputs": outputs, "variants": variants}
        for name, source in zip(STAGES, ("request.inputs.x", "first.outputs.y"), strict=True)
    ]
    spec = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [numbers]}],
        "outputs": [{"name": "y", "from": "second.outputs.y"}],
        "stages": stages,
        "slo": {"latency": slo_seconds},
        "budget": {"cores": 2},
    }
    return InferencePipeline.model_validate({"kind": "InferencePipeline", "metadata": {"name": "echo"}, "spec": spec})


@asynccontextmanager
async def served(
    pipeline: InferencePipeline, batch_size: int, delay_seconds: float, *, proxy: bool = True
) -> AsyncIterator[Served]:
    """Run a pipeline's model servers, its router, and a proxy in front; without a proxy the router serves REST only."""
    async with _starting() as (folder, start), AsyncExitStack() as stack:
        servers, data_ports = [], []
        for stage in STAGES:
            write_model_folder(pipeline, folder, stage, ["echo"], folder / stage, 1.0)
            servers.append(await start("trimtab_model_servers", str(folder / stage)))
            data_ports.append((await servers[-1].read_ready_line(ReplicaPorts, START_SECONDS)).data_port)
        plan = echo_plan(pipeline, batch_size, delay_seconds)
        front = await stack.enter_async_context(routed(pipeline, plan, data_ports, proxy=proxy))
        yield replace(front, servers=tuple(server.pid for server in servers))


@asynccontextmanager
async def routed(
    pipeline: InferencePipeline, plan: PipelinePlan, data_ports: Sequence[int], *, proxy: bool = True, tree: Path = ROOT
) -> AsyncIterator[Served]:
    """Run a checkout's router, and its proxy, in front of running model servers."""
    async with _starting(tree) as (folder, start):
        documents = {"pipeline.yaml": pipeline, "plan.json": plan, "endpoints.json": endpoints_of(data_ports)}
        for name, document in documents.items():  # without defaults, because another commit may know fewer fields
            (folder / name).write_text(document.model_dump_json(by_alias=True, exclude_unset=True))
        files = [f"--{name.partition('.')[0]}={folder / name}" for name in documents]
        sockets = [f"--sockets={folder}" if proxy else "--no-proxy"]
        router = await start("trimtab_router", *files, *sockets)
        ports = await router.read_ready_line(RouterPorts, START_SECONDS)
        await until_ready(ports.admin_port)
        fronts, rest_port, grpc_port = [router.pid], ports.rest_port, 0
        if proxy:
            rest_port, grpc_port = free_port(), free_port()
            listen = [f"--rest-port={rest_port}", f"--grpc-port={grpc_port}"]
            envoy = await start(_proxy_module(tree), files[0], *sockets, *listen, is_read=False)
            await until_ready(rest_port)
            fronts.append(envoy.pid)
        yield Served(rest_port, grpc_port, tuple(data_ports), router.pid, tuple(fronts), ())


@asynccontextmanager
async def least_router(data_ports: Sequence[int]) -> AsyncIterator[Served]:
    """Run the least router in front of running model servers."""
    async with _starting() as (_, start):
        router = await start("benchmarks.router.least_router", *(f"{HOST}:{port}" for port in data_ports))
        ports = await router.read_ready_line(RouterPorts, START_SECONDS)
        yield Served(ports.rest_port, 0, tuple(data_ports), router.pid, (router.pid,), ())


@asynccontextmanager
async def chained_mlservers(settings: Mapping[str, Any]) -> AsyncIterator[Served]:
    """Run two plain MLServers with `PlusOne`, as shipped but for these settings of the server."""
    async with _starting() as (folder, start):
        grpc_ports, servers = [], []
        for stage in STAGES:
            http_port, grpc_port = _write_mlserver(folder / stage, settings)
            server = await start("mlserver.cli.main", "start", str(folder / stage), is_read=False)
            await until_ready(http_port, "models/echo")
            grpc_ports.append(grpc_port)
            servers.append(server.pid)
        yield Served(0, 0, tuple(grpc_ports), 0, (), tuple(servers))


def echo_plan(pipeline: InferencePipeline, batch_size: int, delay_seconds: float) -> PipelinePlan:
    seconds = dict.fromkeys((1, batch_size), delay_seconds) if delay_seconds else {}
    planned = {"variant": "echo", "batchSize": batch_size, "replicas": 1, "accuracy": 1.0, "serviceSeconds": seconds}
    stages = [{"name": stage, **planned} for stage in STAGES]
    spec = {"pipeline": pipeline.name, "generation": 1, "createdAt": time.time(), "stages": stages}
    return PipelinePlan.model_validate({"metadata": {"name": pipeline.name}, "spec": spec})


def endpoints_of(data_ports: Sequence[int]) -> Endpoints:
    addresses = {stage: f"{HOST}:{port}" for stage, port in zip(STAGES, data_ports, strict=True)}
    stages = {
        stage: [{"name": f"{stage}-0", "address": address, "variants": ["echo"]}]
        for stage, address in addresses.items()
    }
    return Endpoints.model_validate({"generation": 1, "stages": stages})


@asynccontextmanager
async def _starting(tree: Path = ROOT) -> AsyncIterator[tuple[Path, Callable[..., Awaitable[ChildProcess]]]]:
    """Yield a folder, and a function that starts a checkout's modules on the servers' core; both end with the block."""
    # The launcher is today's, also for a checkout that has none.
    python = ("env", f"PYTHONPATH={_search_path(tree)}", sys.executable, "-m")
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trimtab-")))

        async def start(module: str, *arguments: str, is_read: bool = True) -> ChildProcess:
            log = folder / "log" if is_read else Path(os.devnull)
            pin(SERVER_CORE)
            command = (*python, module, *arguments)
            process = await ChildProcess.start(EXEC, command, log, module, environment=ENVIRONMENT, is_read=is_read)
            pin(CLIENT_CORE)
            stack.push_async_callback(process.stop, STOP_SECONDS)
            return process

        yield folder, start


def _proxy_module(tree: Path) -> str:
    (main,) = tree.glob("router/trimtab_router/*/__main__.py")  # in a package that some commits name otherwise
    return f"trimtab_router.{main.parent.name}"


def _search_path(tree: Path) -> str:
    return os.pathsep.join([*sorted({str(path.parent) for path in tree.glob("*/trimtab*/")}), str(ROOT)])


def _write_mlserver(folder: Path, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Write the settings of one MLServer; return its HTTP and gRPC ports."""
    folder.mkdir()
    http, grpc, metrics = free_port(), free_port(), free_port()
    implementation = "benchmarks.router.mlserver_model.PlusOne"
    (folder / "model-settings.json").write_text(json.dumps({"name": "echo", "implementation": implementation}))
    ports = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics}
    others = {"grpc_max_message_length": 2**26, "metrics_dir": str(folder / ".metrics")}
    (folder / "settings.json").write_text(json.dumps({**ports, **others, **settings}))
    return http, grpc


async def until_ready(port: int, subject: str = "health") -> None:
    url = f"http://{HOST}:{port}/v2/{subject}/ready"
    deadline = time.monotonic() + START_SECONDS
    async with httpx.AsyncClient(trust_env=False) as client:
        while time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                if (await client.get(url)).status_code == httpx.codes.OK:
                    return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} did not become ready within {START_SECONDS:.0f} s")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])
