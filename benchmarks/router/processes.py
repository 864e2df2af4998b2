"""Starts what is measured, on one core: model servers, the router in front of them, and plain MLServers."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from trimtab_model_servers.settings import write_model_folder
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.plan import PipelinePlan
from trimtab_pipelines.routing import Endpoints
from trimtab_pipelines.spec import InferencePipeline

STAGES = ("first", "second")
START_SECONDS = 120.0
SERVER_CORE, CLIENT_CORE = 0, 1
ROOT = Path(__file__).parents[2]


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


def pin(core: int) -> None:
    """Keep this process, and those it starts from now on, on one core; on a machine with one core do nothing."""
    if (os.cpu_count() or 1) > core:
        os.sched_setaffinity(0, {core})


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


@contextlib.contextmanager
def served(
    pipeline: InferencePipeline, batch_size: int, delay_seconds: float, *, door: bool = True
) -> Iterator[Served]:
    """Run a pipeline: one model server a stage, the router, and its door in front; without it there is REST alone."""
    with tempfile.TemporaryDirectory(prefix="trimtab-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        servers = [_model_server(stack, pipeline, stage, folder) for stage in STAGES]
        addresses = {stage: f"127.0.0.1:{port}" for stage, (_, port) in zip(STAGES, servers, strict=True)}
        write_json(folder / "pipeline.yaml", pipeline)
        write_json(folder / "plan.json", echo_plan(pipeline, batch_size, delay_seconds))
        write_json(folder / "endpoints.json", _endpoints(addresses))
        files = ["--pipeline", str(folder / "pipeline.yaml"), "--plan", str(folder / "plan.json")]
        files += ["--endpoints", str(folder / "endpoints.json")]
        sockets = ["--sockets", stack.enter_context(tempfile.TemporaryDirectory(prefix="trimtab-"))]
        router, ports = _start(stack, "trimtab_router", *files, *(sockets if door else []))
        _until(f"http://127.0.0.1:{ports['admin_port']}/v2/health/ready")
        fronts, rest_port, grpc_port = [router], int(ports["rest_port"]), 0
        if door:
            envoy, rest_port, grpc_port = _door(stack, folder / "pipeline.yaml", sockets)
            fronts.append(envoy)
        data_ports, replicas = tuple(port for _, port in servers), tuple(pid for pid, _ in servers)
        yield Served(rest_port, grpc_port, data_ports, router, tuple(fronts), replicas)


def _door(stack: contextlib.ExitStack, pipeline: Path, sockets: Sequence[str]) -> tuple[int, int, int]:
    """Start Envoy; return its process and its ports."""
    rest_port, grpc_port = free_port(), free_port()
    ports = ["--rest-port", str(rest_port), "--grpc-port", str(grpc_port)]
    command = [sys.executable, "-m", "trimtab_router.edge", "--pipeline", str(pipeline), *sockets, *ports]
    process = _spawn(stack, command, subprocess.DEVNULL)
    _until(f"http://127.0.0.1:{rest_port}/v2/health/ready")
    return process.pid, rest_port, grpc_port


@contextlib.contextmanager
def chained_mlservers(
    settings: Mapping[str, Any], model: Mapping[str, Any] | None = None, delay_seconds: float = 0.0
) -> Iterator[Chained]:
    """Run two plain MLServers with `PlusOne`, as shipped but for these settings of theirs and of the model."""
    told = {**(model or {}), "parameters": {"extra": {"delay_seconds": delay_seconds}}}
    with tempfile.TemporaryDirectory(prefix="trimtab-bench-") as name, contextlib.ExitStack() as stack:
        servers = [_mlserver(stack, Path(name) / stage, settings, told) for stage in STAGES]
        yield Chained(tuple(port for _, port in servers), tuple(pid for pid, _ in servers))


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


def _endpoints(addresses: dict[str, str]) -> Endpoints:
    return Endpoints.model_validate(
        {
            "generation": 1,
            "stages": {
                stage: [{"name": f"{stage}-0", "address": address, "variants": ["echo"]}]
                for stage, address in addresses.items()
            },
        }
    )


def _model_server(
    stack: contextlib.ExitStack, pipeline: InferencePipeline, stage: str, folder: Path
) -> tuple[int, int]:
    models = folder / stage
    write_model_folder(pipeline, folder, stage, ["echo"], models, 1.0)
    pid, ports = _start(stack, "trimtab_model_servers", str(models))
    return pid, ports["data_port"]


def _mlserver(
    stack: contextlib.ExitStack, folder: Path, settings: Mapping[str, Any], model: Mapping[str, Any]
) -> tuple[int, int]:
    folder.mkdir()
    http, grpc, metrics = free_port(), free_port(), free_port()
    implementation = "benchmarks.router.mlserver_model.PlusOne"
    (folder / "model-settings.json").write_text(json.dumps({"name": "echo", "implementation": implementation, **model}))
    ports = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics, "grpc_max_message_length": 2**26}
    (folder / "settings.json").write_text(json.dumps({**ports, **settings}))
    process = _spawn(stack, [str(Path(sys.executable).parent / "mlserver"), "start", str(folder)], subprocess.DEVNULL)
    _until(f"http://127.0.0.1:{http}/v2/models/echo/ready")
    return process.pid, grpc


def _start(stack: contextlib.ExitStack, module: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Start one of our processes and read the line it prints once it listens."""
    process = _spawn(stack, [sys.executable, "-m", module, *arguments], subprocess.PIPE)
    assert process.stdout is not None  # noqa: S101 - a pipe was asked for
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{module} ended with exit code {process.wait()}")
    return process.pid, json.loads(line)


def _spawn(stack: contextlib.ExitStack, command: list[str], stdout: int) -> "subprocess.Popen[str]":
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    pin(SERVER_CORE)
    process = subprocess.Popen(
        command, stdout=stdout, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env={**os.environ, **threads}
    )
    pin(CLIENT_CORE)
    stack.callback(_stop, process)
    return process


def _stop(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _until(url: str) -> None:
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url).status_code == httpx.codes.OK:
                return
        time.sleep(0.1)
    raise RuntimeError(f"{url} did not become ready within {START_SECONDS:.0f} s")


def free_port() -> int:
    """A port that nobody had a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
