"""A served pipeline with friendly clients; after each test it is checked that neither was harmed."""

import asyncio
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.builders import a_pipeline, a_plan, a_stage, a_variant
from tests.figures import Figures
from tests.local_run import Up, command_line, until, up
from trimtab_pipelines.documents import load_pipeline, write_json
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_pipelines.processes.parent_death import command_tied_to_parent
from trimtab_profiler.memory import PEAK, forget_peak, read_bytes
from trimtab_router.envoy.sockets import Sockets
from trimtab_router.limits import payload_bytes

MODEL = "sample"
INFER = f"/v2/models/{MODEL}/infer"
MAX_STOP_SECONDS = 0.1
MIN_SECONDS = 1.2
"""A shorter test waits for the consequences of its requests."""
SETTLE_SECONDS = 60.0
CALM_LINES = 400
"""Friendly requests and health checks before the first hostile request: ten seconds."""
MEBIBYTE = 2**20
HOSTILE_NICENESS = 10
"""Real clients run on other machines, and take no processor time from the server."""


class Line(NamedTuple):
    """A friendly request or health check: when it was sent, how long it took, and how."""

    kind: str
    at: float
    seconds: float
    busy_seconds: float
    """Processor time of the router's loop meanwhile; one that blocks is busy."""
    code: str


@dataclass
class Server:
    """A pipeline of two stages that add one each to rows of any width, and its friendly clients."""

    local: Up
    friendly_log: Path = field(default_factory=Path)

    def processes(self) -> dict[str, int]:
        """The ids of the router and of Envoy, if it runs."""
        found = {}
        for process in psutil.Process(self.local.process.pid).children(recursive=True):
            words = command_line(process)
            if "/envoy " in words or " trimtab_router " in words:
                found["router" if " trimtab_router " in words else "envoy"] = process.pid
        return found

    @cached_property
    def router_socket(self) -> Path:
        """The router's own socket, to which Envoy passes requests."""
        words = psutil.Process(self.processes()["router"]).cmdline()
        return Sockets(Path(words[words.index("--sockets") + 1])).requests

    @property
    def payload_bytes(self) -> int:
        """The largest valid request."""
        return payload_bytes(load_pipeline(self.local.folder.parent / "pipeline.yaml"), EdgeSettings())

    def friendly_lines(self, since: float = 0.0) -> list[Line]:
        log = self.friendly_log.read_text(encoding="ascii") if self.friendly_log.exists() else ""
        lines = log.splitlines(keepends=True)
        found = [Line(**json.loads(line)) for line in lines if line.endswith("\n")]
        return [line for line in found if line.at >= since]

    def is_settled(self) -> bool:
        """Whether every request that the router received has ended, and its memory is free again."""
        counters = self.local.counters()
        return counters["received"] == sum(counters.values()) - counters["received"]


@pytest.fixture
def request_count(request: pytest.FixtureRequest) -> int:
    count: int = request.config.getoption("--requests")
    return count


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hostile")
    variant = a_variant(accuracy=1.0, parameters={"delay_seconds": 0.004})
    outputs = [{"name": "y", "datatype": "FP32", "shape": [-1]}]
    sources = {"first": "request.inputs.x", "second": "first.outputs.y"}
    stages = [a_stage(name, source, outputs=outputs, variants=[variant]) for name, source in sources.items()]
    inputs = [{"name": "x", "datatype": "FP32", "shape": [-1]}]
    pipeline = a_pipeline(stages, inputs=inputs, slo={"latency": "10s"}, budget={"cores": "2"})
    write_json(folder / "pipeline.yaml", pipeline)
    write_json(folder / "plan.json", a_plan(pipeline))
    with up(folder, "--plan", str(folder / "plan.json"), pipeline=folder / "pipeline.yaml") as local:
        serving = Server(local, folder / "friendly.jsonl")
        ports = {"rest-port": local.rest_port, "grpc-port": local.grpc_port, "admin-port": local.admin_port}
        options = ports | {"router": serving.processes()["router"], "model": MODEL, "log": serving.friendly_log}
        words = [f"--{name}={value}" for name, value in options.items()]
        friendly = subprocess.Popen(command_tied_to_parent("tests.security.friendly", *words))
        os.setpriority(os.PRIO_PROCESS, 0, HOSTILE_NICENESS)
        try:
            until(
                lambda: serving.friendly_log.exists() and len(serving.friendly_lines()) > CALM_LINES,
                "friends are served",
            )
            yield serving
        finally:
            friendly.terminate()
            friendly.wait()


@pytest.fixture
async def hostile(server: Server, figures: Figures) -> AsyncIterator[Server]:
    """The server, for one kind of hostile client; checks afterwards that nothing but this client was affected."""
    processes, began = server.processes(), time.monotonic()
    forget_peak_memory(processes.values())
    yield server
    await asyncio.sleep(max(began + MIN_SECONDS - time.monotonic(), 0.0))
    await asyncio.to_thread(until, server.is_settled, "the router has ended all requests", SETTLE_SECONDS)
    ended = time.monotonic()
    await asyncio.to_thread(until, lambda: len(server.friendly_lines(ended)) > 2, "friends are served again")

    lines = server.friendly_lines(began)
    stops = [min(line.seconds, line.busy_seconds) for line in lines if line.kind == "health"]
    limits = {"router": load_pipeline(server.local.folder.parent / "pipeline.yaml").spec.router.resources.memory}
    limits["envoy"] = EdgeSettings().memory
    assert server.processes() == processes
    assert Counter(line.code for line in lines if line.code != "ok") == {}
    for name, pid in processes.items():
        peak, limit = read_bytes(pid, PEAK) / MEBIBYTE, limits[name] / MEBIBYTE
        figures.require(f"peak memory of {name}, MiB", round(peak, 1), "<=", limit)
    figures.require("longest stop of the router's loop, seconds", round(max(stops), 3), "<=", MAX_STOP_SECONDS)


def forget_peak_memory(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(OSError):
            forget_peak(pid)
