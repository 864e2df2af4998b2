"""One replica: MLServer over a folder of models, with the data port beside it.

Importing this module starts no thread, no event loop and no gRPC: a forkserver that has imported it makes replicas
that need not import torch and MLServer again.
"""

import asyncio
import gc
import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlserver
from mlserver.repository.load import load_model_settings
from pydantic import ValidationError

import trimtab_model_servers.runtime  # noqa: F401  (imports torch ahead of the fork)
from trimtab_model_servers.body_limit import BodyLimit
from trimtab_model_servers.data_port import DataPort
from trimtab_model_servers.errors import ModelError
from trimtab_model_servers.logs import LOGGING
from trimtab_model_servers.model_registry import ModelRegistry, host
from trimtab_model_servers.ports import ReservedPort
from trimtab_model_servers.settings import server_settings
from trimtab_pipelines.processes.malloc_tuning import keep_freed_memory
from trimtab_pipelines.processes.ready_line import ReplicaPorts
from trimtab_protocol import event_loop
from trimtab_protocol.mutual_tls import MutualTls

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_POLL_SECONDS = 0.005
_LOOPBACK = "127.0.0.1"
_ANY_PORT = ReplicaPorts(0, 0, 0)
LONGEST_DRAIN_SECONDS = 20.0
LARGEST_KEPT_BYTES, MOST_KEPT_BYTES = 32 * 2**20, 256 * 2**20
"""Of the memory that a batch frees: got anew for each, its page faults took as long as a small network's computing."""


def run(
    folder: Path,
    on_ready: Callable[[ReplicaPorts], None],
    *,
    address: str = _LOOPBACK,
    plain_address: str = _LOOPBACK,
    ports: ReplicaPorts = _ANY_PORT,
    drain_seconds: float = 0.0,
    identity: MutualTls | None = None,
    health_port: int | None = None,
    metrics_port: int | None = None,
) -> None:
    """Serve the models of a folder until SIGTERM or SIGINT, or until one of them fails for good.

    Args:
        folder: holds settings.json and NAME/model-settings.json, as `settings.write_model_folder` writes them.
        on_ready: called once, when every model is loaded and warmed and all ports listen.
        address: where the data port listens.
        plain_address: where MLServer's own ports listen.
        ports: for each 0 a free one is taken.
        drain_seconds: once told to stop, go on until nothing was asked for so long, but no longer than
            LONGEST_DRAIN_SECONDS.
        identity: with it the data port speaks TLS with who shows a certificate, and with nobody else.
        health_port: where whoever asks is told, in plain HTTP, whether it is alive and ready, and no more.
        metrics_port: where whoever asks is told, in plain HTTP, what chats hold and have done, and no more.

    Raises:
        ModelError: a model cannot be loaded, the folder holds none, or one failed for good while it served.
        OSError: a port is taken.
    """
    keep_freed_memory(LARGEST_KEPT_BYTES, MOST_KEPT_BYTES)
    gc.freeze()  # or each full collection would walk all of torch, and a fork would copy what it walks
    with asyncio.Runner(loop_factory=event_loop.new_event_loop) as runner:
        doors = _Listeners(address, plain_address, ports, identity, health_port, metrics_port)
        runner.run(_serve(folder, on_ready, doors, drain_seconds))


@dataclass(frozen=True, slots=True)
class _Listeners:
    """Where it is to listen, and who may bring batches."""

    address: str
    plain_address: str
    ports: ReplicaPorts
    identity: MutualTls | None
    health_port: int | None
    metrics_port: int | None

    async def open(self, port: DataPort) -> None:
        """Open the data port, and the plain ones that are asked for."""
        await port.start(self.address, self.ports.data_port, self.identity)
        if self.health_port is not None:
            await port.tell_health(self.address, self.health_port)
        if self.metrics_port is not None:
            await port.tell_metrics(self.address, self.metrics_port)


async def _serve(
    folder: Path, on_ready: Callable[[ReplicaPorts], None], doors: _Listeners, drain_seconds: float
) -> None:
    address, asked = doors.plain_address, doors.ports
    models = _model_settings(folder)
    process = host()
    process.expected |= {settings.name for settings in models}
    stopping = asyncio.Event()
    data_port, process.has_data_port = DataPort(process), True
    if doors.identity is not None:
        process.tls = doors.identity.connecting
    await doors.open(data_port)
    with ReservedPort(address, asked.http_port) as http, ReservedPort(address, asked.grpc_port) as grpc:
        ports = ReplicaPorts(data_port.port, http.number, grpc.number)
        server = mlserver.MLServer(_settings(folder, address, ports))
        server._rest_server._app.add_middleware(BodyLimit)  # noqa: SLF001 - MLServer offers no other way
        _stop_on_signals(stopping)
        serving = asyncio.create_task(server.start(list(models)))
        ready = await _until_ready(process, serving, stopping, ports, address)
    if ready:
        _stop_on_signals(stopping)
        gc.collect()
        gc.freeze()
        on_ready(ports)
        breaking = asyncio.create_task(process.broke.wait())
        await _first({serving, breaking}, stopping)
        breaking.cancel()
        process.leaving = True
        await _until_quiet(process, drain_seconds)
        await process.worker.drain()
        await server.stop()
        await serving
        await data_port.stop()
    process.worker.close()
    for name, reason in process.broken.items():
        raise ModelError(f"model {name}: {reason}")


def _model_settings(folder: Path) -> Sequence[mlserver.ModelSettings]:
    """Read every model's settings; MLServer itself would pass over a broken one."""
    found = []
    for path in sorted(folder.glob("**/model-settings.json")):
        try:
            found.append(load_model_settings(str(path)))
        except (OSError, ValueError, ValidationError) as error:
            raise ModelError(f"{path}: {' '.join(str(error).split())}") from error
    if not found:
        raise ModelError(f"{folder} holds no model; expected NAME/model-settings.json")
    return found


def _settings(folder: Path, address: str, ports: ReplicaPorts) -> mlserver.Settings:
    path = folder / "settings.json"
    try:
        chosen = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error
    forced = {
        "host": address,
        "http_port": ports.http_port,
        "grpc_port": ports.grpc_port,
        "model_repository_root": str(folder),
        "logging_settings": LOGGING,
    }
    return mlserver.Settings(**{**chosen, **server_settings(), **forced})


async def _until_ready(
    process: ModelRegistry, serving: "asyncio.Task[None]", stopping: asyncio.Event, ports: ReplicaPorts, address: str
) -> bool:
    """Wait until every model is loaded and both of MLServer's ports listen; False where a signal came first.

    Raises:
        ModelError: a model cannot be loaded, or MLServer cannot listen.
    """
    settled = asyncio.create_task(process.settled.wait())
    await _first({serving, settled}, stopping)
    settled.cancel()
    for name, reason in process.failures.items():
        raise ModelError(f"model {name}: {reason}")
    for port in (ports.http_port, ports.grpc_port):
        while not stopping.is_set() and not await _listens(address, port):
            if serving.done():
                raise ModelError(f"MLServer stopped before its models were ready: {serving.exception()}")
            await asyncio.sleep(_POLL_SECONDS)  # MLServer does not say when it listens
    return not stopping.is_set()


async def _until_quiet(process: ModelRegistry, drain_seconds: float) -> None:
    """Wait until no batch was asked for this long: callers learn only by and by that we go."""
    loop = asyncio.get_running_loop()
    told_at = loop.time()
    while True:
        quiet_at = max(told_at, process.worker.last_asked_at) + drain_seconds
        left = min(quiet_at, told_at + LONGEST_DRAIN_SECONDS) - loop.time()
        if drain_seconds <= 0 or left <= 0:
            return
        await asyncio.sleep(left)


async def _first(tasks: "set[asyncio.Task[Any]]", stopping: asyncio.Event) -> None:
    """Wait for the first of these tasks, or for a signal to stop."""
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
    """Take the signals from MLServer, and once it runs from uvicorn inside it: we drain first."""
    for number in _STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
