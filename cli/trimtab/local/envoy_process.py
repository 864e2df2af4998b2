"""Shell: the Envoy in front of the local router, a process like the others, and where it listens."""

import asyncio
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from trimtab_pipelines.processes.child_process import ChildProcess, StartError
from trimtab_router.envoy.sockets import Sockets

_LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class EnvoyPorts:
    """Where callers come in."""

    rest_port: int
    grpc_port: int


def make_sockets() -> Sockets:
    """A folder for the sockets, this user's alone; a socket's path must be short, whatever the run folder's is."""
    return Sockets(Path(tempfile.mkdtemp(prefix="trimtab-")))


async def start_envoy(
    pipeline: Path, sockets: Sockets, edge: Path | None, ports: EnvoyPorts, log: Path
) -> ChildProcess:
    """Start Envoy in front of the router behind these sockets."""
    arguments = ["--pipeline", str(pipeline), "--sockets", str(sockets.folder)]
    arguments += ["--rest-port", str(ports.rest_port), "--grpc-port", str(ports.grpc_port)]
    if edge is not None:
        arguments += ["--edge", str(edge)]
    return await ChildProcess.start("trimtab_router.envoy", arguments, log, "the door", is_read=False)


async def open_ports(door: ChildProcess, sockets: Sockets, timeout_seconds: float) -> EnvoyPorts:
    """Wait until it takes callers; raises StartError where it does not come up."""
    ended = asyncio.create_task(door.wait())
    opened = asyncio.create_task(_opened(sockets))
    try:
        await asyncio.wait({ended, opened}, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise StartError(door.exit_message(ended.result()))
        if not opened.done():
            raise StartError(f"the door did not open within {timeout_seconds:g} s")
        return opened.result()
    finally:
        ended.cancel()
        opened.cancel()


async def _opened(sockets: Sockets) -> EnvoyPorts:
    transport = httpx.AsyncHTTPTransport(uds=str(sockets.envoy))
    async with httpx.AsyncClient(transport=transport, base_url="http://envoy", timeout=2.0) as client:
        while True:
            with suppress(httpx.HTTPError):
                if (await client.get("/ready")).status_code == httpx.codes.OK:
                    listeners = (await client.get("/listeners", params={"format": "json"})).json()
                    return _ports(listeners["listener_statuses"][0])
            await asyncio.sleep(_LOOK_SECONDS)


def _ports(listener: Mapping[str, Any]) -> EnvoyPorts:
    addresses = [listener["local_address"], *listener["additional_local_addresses"]]
    return EnvoyPorts(*(address["socket_address"]["port_value"] for address in addresses))
