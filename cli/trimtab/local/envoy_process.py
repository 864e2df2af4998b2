"""Envoy process of the local runtime."""

import asyncio
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from trimtab_pipelines.processes.child_process import ChildProcess, StartError, command_options
from trimtab_router.envoy.sockets import Sockets

_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class EnvoyPorts:
    """Ports that clients connect to."""

    rest_port: int
    grpc_port: int


def make_sockets() -> Sockets:
    """Create a private folder for the sockets, in the temporary folder since a socket's path must be short."""
    return Sockets(Path(tempfile.mkdtemp(prefix="trimtab-")))


async def start_envoy(
    pipeline: Path, sockets: Sockets, edge: Path | None, ports: EnvoyPorts, log: Path
) -> ChildProcess:
    """Start Envoy in front of the router that listens on the sockets."""
    arguments = command_options(
        pipeline=pipeline, sockets=sockets.folder, rest_port=ports.rest_port, grpc_port=ports.grpc_port, edge=edge
    )
    return await ChildProcess.start("trimtab_router.envoy", arguments, log, "Envoy", is_read=False)


async def wait_for_ports(process: ChildProcess, sockets: Sockets, timeout_seconds: float) -> EnvoyPorts:
    """Wait until Envoy listens; raises StartError if it ends or times out."""
    ended = asyncio.create_task(process.wait())
    opened = asyncio.create_task(_poll_ports(sockets))
    try:
        await asyncio.wait({ended, opened}, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise StartError(process.exit_message(ended.result()))
        if not opened.done():
            raise StartError(f"Envoy did not listen within {timeout_seconds:g} s")
        return opened.result()
    finally:
        ended.cancel()
        opened.cancel()


async def _poll_ports(sockets: Sockets) -> EnvoyPorts:
    connector, timeout = aiohttp.UnixConnector(str(sockets.envoy_admin)), aiohttp.ClientTimeout(total=2.0)
    async with aiohttp.ClientSession("http://envoy", connector=connector, timeout=timeout) as session:
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get("/ready", raise_for_status=True):
                    pass
                async with session.get("/listeners", params={"format": "json"}, raise_for_status=True) as response:
                    listeners = await response.json(content_type=None)
                    return _ports(listeners["listener_statuses"][0])
            await asyncio.sleep(_POLL_SECONDS)


def _ports(listener: Mapping[str, Any]) -> EnvoyPorts:
    addresses = [listener["local_address"], *listener["additional_local_addresses"]]
    return EnvoyPorts(*(address["socket_address"]["port_value"] for address in addresses))
