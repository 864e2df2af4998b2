"""Starts what is measured, on one core: model servers, the router in front of them, and plain MLServers."""

import asyncio
import json
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.cores import CLIENT_CORE, SERVER_CORE, pin
from trimtab_model_servers.server.settings import write_model_folder
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.endpoints import Endpoints
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.processes.child_process import ChildProcess, ReplicaPorts, RouterPorts
from trimtab_pipelines.spec import InferencePipeline

STAGES = ("first", "second")
START_SECONDS, STOP_SECONDS = 120.0, 15.0
ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@dataclass(frozen=True, slots=True)
class Usage:
    """What processes used: seconds of processor time so far, peak resident bytes."""

    cpu_seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Served:
    """A pipeline that runs: where its front doors and its model servers listen.

    `grpc_port` is 0 without a door; `fronts` are the processes before the model servers: the router, and its door.
    """

    rest_port: int
    grpc_port: int
    data_ports: tuple[int, ...]
    router: int
    fronts: tuple[int, ...]
    servers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chained:
    """Plain MLServers that run: their gRPC ports."""

    grpc_ports: tuple[int, ...]
    servers: tuple[int, ...]


def usage(processes: Sequence[int]) -> Usage:
    """Sum over processes and their children."""
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
    stages = [
        {
            "name": name,
            "inputs": [{"name": "x", "from": source}],
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [numbers]}],
            "variants": [
                {
                    "name": "echo",
                    "family": "echo",
                    "parameters": {"delay_seconds": delay_seconds},
                    "storageUri": "random://?seed=0",
                    "accuracy": 1.0,
                }
            ],
        }
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
    pipeline: InferencePipeline, batch_size: int, delay_seconds: float, *, door: bool = True
) -> AsyncIterator[Served]:
    """Run a pipeline: one model server a stage, the router, and its door in front; without it there is REST alone."""
    async with _starting() as (folder, start):
        servers, data_ports = [], []
        for stage in STAGES:
            write_model_folder(pipeline, folder, stage, ["echo"], folder / stage, 1.0)
            servers.append(await start("trimtab_model_servers", str(folder / stage)))
            data_ports.append((await servers[-1].read_ready_line(ReplicaPorts, START_SECONDS)).data_port)
        write_json(folder / "pipeline.yaml", pipeline)
        write_json(folder / "plan.json", echo_plan(pipeline, batch_size, delay_seconds))
        write_json(folder / "endpoints.json", endpoints_of(data_ports))
        files = [f"--{name.partition('.')[0]}={folder / name}" for name in ("pipeline.yaml", "plan.json")]
        sockets = [f"--sockets={folder}" if door else "--no-proxy"]
        router = await start("trimtab_router", *files, f"--endpoints={folder / 'endpoints.json'}", *sockets)
        ports = await router.read_ready_line(RouterPorts, START_SECONDS)
        await until_ready(ports.admin_port)
        fronts, rest_port, grpc_port = [router.pid], ports.rest_port, 0
        if door:
            rest_port, grpc_port = free_port(), free_port()
            told = [f"--rest-port={rest_port}", f"--grpc-port={grpc_port}"]
            envoy = await start("trimtab_router.envoy", files[0], *sockets, *told, is_read=False)
            await until_ready(rest_port)
            fronts.append(envoy.pid)
        replicas = tuple(server.pid for server in servers)
        yield Served(rest_port, grpc_port, tuple(data_ports), router.pid, tuple(fronts), replicas)


@asynccontextmanager
async def chained_mlservers(
    settings: Mapping[str, Any], model: Mapping[str, Any] | None = None, delay_seconds: float = 0.0
) -> AsyncIterator[Chained]:
    """Run two plain MLServers with `PlusOne`, as shipped but for these settings of theirs and of the model."""
    told = {**(model or {}), "parameters": {"extra": {"delay_seconds": delay_seconds}}}
    async with _starting() as (folder, start):
        grpc_ports, servers = [], []
        for stage in STAGES:
            http_port, grpc_port = _write_mlserver(folder / stage, settings, told)
            server = await start("mlserver.cli.main", "start", str(folder / stage), is_read=False)
            await until_ready(http_port, "models/echo")
            grpc_ports.append(grpc_port)
            servers.append(server.pid)
        yield Chained(tuple(grpc_ports), tuple(servers))


def echo_plan(pipeline: InferencePipeline, batch_size: int, delay_seconds: float) -> PipelinePlan:
    """One replica a stage, with the times that its model takes."""
    seconds = dict.fromkeys((1, batch_size), delay_seconds) if delay_seconds else {}
    stages = [
        {
            "name": stage,
            "variant": "echo",
            "batchSize": batch_size,
            "replicas": 1,
            "accuracy": 1.0,
            "serviceSeconds": seconds,
        }
        for stage in STAGES
    ]
    spec = {"pipeline": pipeline.name, "generation": 1, "createdAt": time.time(), "stages": stages}
    return PipelinePlan.model_validate({"metadata": {"name": pipeline.name}, "spec": spec})


def endpoints_of(data_ports: Sequence[int]) -> Endpoints:
    """One replica a stage, which listens there."""
    addresses = {stage: f"{HOST}:{port}" for stage, port in zip(STAGES, data_ports, strict=True)}
    stages = {
        stage: [{"name": f"{stage}-0", "address": address, "variants": ["echo"]}]
        for stage, address in addresses.items()
    }
    return Endpoints.model_validate({"generation": 1, "stages": stages})


@asynccontextmanager
async def _starting() -> AsyncIterator[tuple[Path, Callable[..., Awaitable[ChildProcess]]]]:
    """A folder, and what starts modules on the servers' core; both end with the block."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trimtab-")))

        async def start(module: str, *arguments: str, is_read: bool = True) -> ChildProcess:
            log = folder / "log" if is_read else Path(os.devnull)
            pin(SERVER_CORE)
            process = await ChildProcess.start(module, arguments, log, module, environment=ENVIRONMENT, is_read=is_read)
            pin(CLIENT_CORE)
            stack.push_async_callback(process.stop, STOP_SECONDS)
            return process

        yield folder, start


def _write_mlserver(folder: Path, settings: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[int, int]:
    """Write what one MLServer serves; return its HTTP and gRPC ports."""
    folder.mkdir()
    http, grpc, metrics = free_port(), free_port(), free_port()
    implementation = "benchmarks.router.mlserver_model.PlusOne"
    (folder / "model-settings.json").write_text(json.dumps({"name": "echo", "implementation": implementation, **model}))
    ports = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics}
    others = {"grpc_max_message_length": 2**26, "metrics_dir": str(folder / ".metrics")}
    (folder / "settings.json").write_text(json.dumps({**ports, **others, **settings}))
    return http, grpc


async def until_ready(port: int, what: str = "health") -> None:
    """Wait until what listens there says that it is ready."""
    url = f"http://{HOST}:{port}/v2/{what}/ready"
    give_up = time.monotonic() + START_SECONDS
    async with httpx.AsyncClient(trust_env=False) as client:
        while time.monotonic() < give_up:
            with suppress(httpx.TransportError):
                if (await client.get(url)).status_code == httpx.codes.OK:
                    return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} did not become ready within {START_SECONDS:.0f} s")


def free_port() -> int:
    """A port that nobody had a moment ago."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])
