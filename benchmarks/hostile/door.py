"""Starts one pipeline as `trimtab up` does, and tells by ports and process lists what stands at its door."""

import resource
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.router.processes import echo_pipeline, echo_plan
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_pipelines.documents import write_json
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_pipelines.router_state import READY_PATH
from trimtab_router.limits import payload_bytes

SLO_SECONDS = 0.5
MODEL = "echo"
INFER = f"/v2/models/{MODEL}/infer"
HEALTH = READY_PATH
"""The address an administrator asks whether the router is well; its own loop answers."""
BATCH_SIZE = 8
DELAY_SECONDS = 0.004
OPEN_FILES = 16_384


@dataclass(frozen=True, slots=True)
class Door:
    """Where callers knock, where administrators look, and how much memory each process may take."""

    local: Supervisor
    limits_bytes: dict[str, int]

    @property
    def payload_bytes(self) -> int:
        """The largest request that is legal."""
        return payload_bytes(self.local.pipeline, EdgeSettings())

    @property
    def rest(self) -> int:
        """The port of REST."""
        return self.local.rest_port

    @property
    def grpc(self) -> int:
        """The port of gRPC."""
        return self.local.grpc_port

    @property
    def behind(self) -> Path:
        """The router's own socket, where Envoy passes requests on."""
        if self.local.sockets is None:
            raise RuntimeError("there is no Envoy before this router")
        return self.local.sockets.requests

    @property
    def admin(self) -> str:
        """Address of health, state and metrics."""
        return self.local.client.url

    def processes(self) -> dict[str, int]:
        """The ids of the router and, where there is one, Envoy."""
        found: dict[str, int] = {}
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if child.status() == psutil.STATUS_ZOMBIE:
                    continue
                if child.name() == "envoy":
                    found["envoy"] = child.pid
                elif "trimtab_router" in child.cmdline():
                    found["router"] = child.pid
        return found

    def connections(self) -> int:
        """How many connections callers other than this process have, or had and nobody closed, at the door."""
        own = {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.laddr}
        listed = [c for pid in self.processes().values() for c in psutil.Process(pid).net_connections("tcp")]
        at_door = [c for c in listed if c.laddr.port in {self.rest, self.grpc} and c.raddr]
        return sum(c.raddr.port not in own for c in at_door)


@asynccontextmanager
async def serving() -> AsyncIterator[Door]:
    """Two stages of y = x + 1 over rows of any length, ready; each process may take what its limit in a pod is."""
    most = min(OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    pipeline = echo_pipeline(-1, DELAY_SECONDS, SLO_SECONDS)
    with tempfile.TemporaryDirectory(prefix="trimtab-bench-") as name:
        file = Path(name) / "pipeline.yaml"
        write_json(file, pipeline)
        setup = Setup(file, Path(name) / "run", plan=echo_plan(pipeline, BATCH_SIZE, DELAY_SECONDS))
        async with Supervisor(setup) as local:
            await local.ready()
            yield Door(local, {"router": pipeline.spec.router.resources.memory, "envoy": EdgeSettings().memory})
