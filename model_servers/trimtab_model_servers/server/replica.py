"""One replica: MLServer over a folder of models, and the data port.

Importing this module starts no thread, no event loop and no gRPC, so that a forkserver can import it once for all
replicas.
"""

import asyncio
import gc
import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn.protocols.http.auto as _uvicorn_protocol  # noqa: F401  (imported before a fork rather than on start)
from pydantic import ValidationError

from trimtab_model_servers.batch_worker import BatchWorker
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.lean_mlserver import mlserver
from trimtab_model_servers.server.data_port import DataPort
from trimtab_model_servers.server.hosted_model import load
from trimtab_model_servers.server.mlserver_setup import LOGGING, ReservedPort, limit_bodies
from trimtab_model_servers.server.model_registry import ModelRegistry, process_registry
from trimtab_model_servers.server.runtime import spec_of
from trimtab_model_servers.server.settings import server_settings
from trimtab_pipelines.processes.child_process import ReplicaPorts
from trimtab_pipelines.processes.malloc_tuning import release_freed_memory, retain_freed_memory
from trimtab_protocol import event_loop
from trimtab_protocol.mutual_tls import MutualTls

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_POLL_SECONDS = 0.005
_LOOPBACK = "127.0.0.1"
_ANY_PORTS = ReplicaPorts(0, 0, 0)
MAX_DRAIN_SECONDS = 20.0
MAX_RETAINED_BLOCK_BYTES, MAX_RETAINED_BYTES = 32 * 2**20, 256 * 2**20
"""Freed memory that is retained: page faults of fresh memory took as long per batch as a small network's compute."""


@dataclass(frozen=True, slots=True)
class Listeners:
    """Addresses and ports of a replica; port 0 is a free one."""

    address: str = _LOOPBACK
    """Of the data port."""
    plain_address: str = _LOOPBACK
    """Of MLServer's own ports."""
    ports: ReplicaPorts = _ANY_PORTS
    identity: MutualTls | None = None
    """Enables mutual TLS on the data port."""
    health_port: int | None = None
    """Plain HTTP port that serves only health."""
    metrics_port: int | None = None
    """Plain HTTP port that serves only metrics."""

    async def open(self, port: DataPort) -> None:
        await port.start(self.address, self.ports.data_port, self.identity)
        if self.health_port is not None:
            await port.serve_health(self.address, self.health_port)
        if self.metrics_port is not None:
            await port.serve_metrics(self.address, self.metrics_port)


_ON_LOOPBACK = Listeners()


def run(
    folder: Path,
    on_ready: Callable[[ReplicaPorts], None],
    listeners: Listeners = _ON_LOOPBACK,
    drain_seconds: float = 0.0,
) -> None:
    """Serve the models of a folder until SIGTERM or SIGINT, or until one of them fails for good.

    ``on_ready`` is called once every model is loaded and warmed up and all ports listen. After a signal, the replica
    serves until no request has arrived for ``drain_seconds``, at most MAX_DRAIN_SECONDS. Raises ModelError if a model
    cannot be loaded or fails, OSError if a port is taken.
    """
    retain_freed_memory(MAX_RETAINED_BLOCK_BYTES, MAX_RETAINED_BYTES)
    gc.freeze()  # else each full collection would scan all of torch, and a fork would copy the scanned pages
    with asyncio.Runner(loop_factory=event_loop.new_event_loop) as runner:
        runner.run(_serve(folder, on_ready, listeners, drain_seconds))


def check(folder: Path) -> None:
    """Load the models of a folder, one after the other; raises ModelError for the first that cannot be loaded."""
    worker = BatchWorker()
    for settings in _model_settings(folder):
        try:
            load(spec_of(settings), worker)
        except ModelError as error:
            raise ModelError(f"model {settings.name}: {error}") from error


async def _serve(
    folder: Path, on_ready: Callable[[ReplicaPorts], None], listeners: Listeners, drain_seconds: float
) -> None:
    address, requested = listeners.plain_address, listeners.ports
    models = _model_settings(folder)
    process = process_registry()
    process.expected |= {settings.name for settings in models}
    stopping = asyncio.Event()
    data_port, process.has_data_port = DataPort(process), True
    if listeners.identity is not None:
        process.tls = listeners.identity.client_context
    await listeners.open(data_port)
    with ReservedPort(address, requested.http_port) as http, ReservedPort(address, requested.grpc_port) as grpc:
        ports = ReplicaPorts(data_port.port, http.number, grpc.number)
        server = mlserver.MLServer(_settings(folder, address, ports))
        limit_bodies(server._rest_server._app)  # noqa: SLF001  (MLServer has no public way)
        _stop_on_signals(stopping)
        serving = asyncio.create_task(server.start(list(models)))
        ready = await _until_ready(process, serving, stopping, ports, address)
    if ready:
        _stop_on_signals(stopping)
        gc.collect()
        release_freed_memory()  # of the warm-up's largest batches
        gc.freeze()
        on_ready(ports)
        failing = asyncio.create_task(process.model_failed.wait())
        await _first({serving, failing}, stopping)
        failing.cancel()
        process.terminating = True
        await _until_quiet(process, drain_seconds)
        await process.worker.drain()
        await server.stop()
        await serving
        await data_port.stop()
    process.worker.close()
    for name, reason in process.failed_models.items():
        raise ModelError(f"model {name}: {reason}")


def _model_settings(folder: Path) -> Sequence[mlserver.ModelSettings]:
    """Read every model's settings; MLServer itself would skip an invalid one."""
    models = []
    for path in sorted(folder.glob("**/model-settings.json")):
        try:
            models.append(mlserver.repository.load.load_model_settings(str(path)))
        except (OSError, ValueError, ValidationError) as error:
            raise ModelError(f"{path}: {' '.join(str(error).split())}") from error
    if not models:
        raise ModelError(f"{folder} holds no model; expected NAME/model-settings.json")
    return models


def _settings(folder: Path, address: str, ports: ReplicaPorts) -> mlserver.Settings:
    path = folder / "settings.json"
    try:
        custom = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error
    forced = {
        "host": address,
        "http_port": ports.http_port,
        "grpc_port": ports.grpc_port,
        "model_repository_root": str(folder),
        "logging_settings": LOGGING,
        "kafka_enabled": False,
        "tracing_server": None,
    }
    return mlserver.Settings(**{**custom, **server_settings(), **forced})


async def _until_ready(
    process: ModelRegistry, serving: "asyncio.Task[None]", stopping: asyncio.Event, ports: ReplicaPorts, address: str
) -> bool:
    """Wait until every model is loaded and MLServer's ports listen; False if a signal comes first; ModelError."""
    finished = asyncio.create_task(process.load_finished.wait())
    await _first({serving, finished}, stopping)
    finished.cancel()
    for name, reason in process.load_failures.items():
        raise ModelError(f"model {name}: {reason}")
    for port in (ports.http_port, ports.grpc_port):
        while not stopping.is_set() and not await _listens(address, port):
            if serving.done():
                raise ModelError(f"MLServer stopped before its models were ready: {serving.exception()}")
            await asyncio.sleep(_POLL_SECONDS)  # MLServer does not report when it listens
    return not stopping.is_set()


async def _until_quiet(process: ModelRegistry, drain_seconds: float) -> None:
    """Wait until no request has arrived for this long: routers need time to stop sending them."""
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    while True:
        quiet_at = max(began_at, process.worker.last_batch_at) + drain_seconds
        remaining = min(quiet_at, began_at + MAX_DRAIN_SECONDS) - loop.time()
        if drain_seconds <= 0 or remaining <= 0:
            return
        await asyncio.sleep(remaining)


async def _first(tasks: "set[asyncio.Task[Any]]", stopping: asyncio.Event) -> None:
    """Wait for the first of these tasks, or for a stop signal."""
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({*tasks, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()


async def _listens(address: str, port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(address, port)
    except OSError:
        return False
    writer.close()
    return True


def _stop_on_signals(stopping: asyncio.Event) -> None:
    """Handle the signals instead of MLServer and uvicorn, to drain first."""
    for number in _STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
