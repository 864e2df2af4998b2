"""Faults of one part at a time, under a steady load of two replicas and two routers: what callers see, and how long."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from resource import RLIM_INFINITY, RLIMIT_FSIZE
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.builders import a_pipeline_document, a_stage, a_variant
from tests.endurance.callers import RATE_RPS, Callers, send_through
from tests.figures import Figures
from tests.local_run import Up, up
from tests.processes import held_port, running
from tests.router.envoy.openssl import Authority, Holder, replace
from trimtab_pipelines.documents import dump_yaml
from trimtab_pipelines.edge_settings import EdgeSettings
from trimtab_pipelines.processes.parent_death import command_tied_to_parent

pytestmark = [pytest.mark.endurance, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

MODEL = '''
import os
import time
from pathlib import Path

import torch


class Model(torch.nn.Module):
    """Adds one, unless a file with its process id names a fault."""

    inputs = {"x": ("FP32", (4,))}
    outputs = {"y": ("FP32", (4,))}

    def forward(self, x):
        fault = Path(os.environ["FAULTS"]) / str(os.getpid())
        kind = fault.read_text() if fault.exists() else ""
        if kind == "error":
            raise RuntimeError("the device is gone")
        time.sleep(0.04 if kind == "slow" else 0.01)
        return x + 1
'''
PROCESS = """
import os
import socket
import time
from pathlib import Path

FOLDER = Path(os.environ["FAULTS"])
read_clock, look_up = time.time, socket.getaddrinfo


def shifted_clock():
    file = FOLDER / "clock"
    return read_clock() + (float(file.read_text()) if file.exists() else 0.0)


def hanging_look_up(host, *options, **named):
    while host == "localhost" and (FOLDER / "dns").exists():
        time.sleep(0.05)
    return look_up(host, *options, **named)


time.time, socket.getaddrinfo = shifted_clock, hanging_look_up
"""
"""Imported by every process at its start: its clock and its name server have faults by files."""

EJECTED = re.compile(r'^trimtab_replica_ejected\{.*replica="([^"]+)".*\} 1\.0$', re.MULTILINE)
SLO, SLO_SECONDS = "180ms", 0.18
CALM_SECONDS, LASTING_SECONDS, FULL_DISK_SECONDS, HOUR_SECONDS = 3.0, 10.0, 15.0, 3600
MAX_BAD_SHARE = 0.01
"""Of the requests of a fault that lasts, after the first seconds."""
MAX_RETURN_SECONDS = 10.0
"""Until an ejected replica that is well is used again."""
PATIENCE_SECONDS = 60.0
ANSWER_SECONDS, START_SECONDS = 5.0, 30.0
"""Until the service is whole; longer if a process must be started."""


class FakePrometheus:
    """The load of a pipeline, as a Prometheus has it that may be wrong."""

    def __init__(self) -> None:
        self.mode = "well"

    async def answer(self, request: web.Request) -> web.Response:
        if self.mode == "gone":
            raise web.HTTPServiceUnavailable
        if self.mode == "hanging":
            await asyncio.sleep(PATIENCE_SECONDS)
        now, rate_rps = time.time(), {"lying": "1e9", "absurd": "NaN"}.get(self.mode, str(RATE_RPS))
        if "step" in request.query:
            times = range(int(now) - 590, int(now) + 1, 10)
            result: dict[str, Any] = {"metric": {}, "values": [[at, rate_rps] for at in times]}
        else:
            result = {"metric": {}, "value": [now, "900" if self.mode == "stale" else "2"]}
        return web.json_response({"status": "success", "data": {"resultType": "it", "result": [result]}})


@dataclass(slots=True)
class Site:
    """A pipeline that `trimtab up` serves, and a second router of the same replicas."""

    served: Up
    folder: Path
    """Of the files that cause faults."""
    pipeline: Path
    edge: Path
    ports: tuple[int, int]
    """Of the second router: REST and administration."""
    authority: Authority
    identity: Holder
    prometheus: FakePrometheus
    session: aiohttp.ClientSession
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    second_router: Any = None

    @property
    def addresses(self) -> tuple[str, str]:
        return f"127.0.0.1:{self.served.rest_port}", f"127.0.0.1:{self.ports[0]}"

    def start_router(self) -> None:
        """Start the second router."""
        record, (rest_port, admin_port) = self.served.folder, self.ports
        command = command_tied_to_parent("trimtab_router", "--pipeline", str(self.pipeline), "--no-proxy")
        command += ["--plan", str(record / "plan.json"), "--endpoints", str(record / "endpoints.json")]
        command += ["--edge", str(self.edge), "--rest-port", str(rest_port), "--admin-port", str(admin_port)]
        self.second_router = self.stack.enter_context(running(command, self.folder / "second-router.log"))

    def process(self, words: str) -> psutil.Process:
        return next(found for found in self.served.running(words) if "parent_death" not in words)

    def replicas(self) -> Mapping[str, int]:
        """Process ids of the replicas that run, by name."""
        found = {}
        for process in psutil.Process(self.served.process.pid).children(recursive=True):
            try:
                log = Path(f"/proc/{process.pid}/fd/1").readlink()
            except OSError:
                continue
            if log.name.startswith("only-"):
                found[log.stem] = process.pid
        return found

    async def used_replicas(self) -> list[set[str]]:
        """Replicas that each router uses; none if it does not respond."""
        return [await self._used_replicas(port) for port in (self.served.admin_port, self.ports[1])]

    async def _used_replicas(self, admin_port: int) -> set[str]:
        try:
            async with self.session.get(f"http://127.0.0.1:{admin_port}/trimtab/v1/state") as response:
                endpoints = (await response.json())["stages"]["only"]["endpoints"]
            async with self.session.get(f"http://127.0.0.1:{admin_port}/metrics") as response:
                ejected = set(EJECTED.findall(await response.text()))
        except (aiohttp.ClientError, TimeoutError):
            return set()
        return {name for name, one in endpoints.items() if one["ready"]} - ejected

    async def whole(self, without: str = "") -> None:
        """Wait until both routers use two replicas, not that one."""

        async def is_whole() -> bool:
            used = await self.used_replicas()
            return used[0] == used[1] and len(used[0]) == 2 and without not in used[0]

        await eventually(is_whole)

    async def decided(self) -> None:
        """Wait for the adapter's next decision."""
        file = self.served.folder / "decisions.jsonl"
        size = file.stat().st_size

        async def has_grown() -> bool:
            return file.stat().st_size > size

        await eventually(has_grown)


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await holds():  # noqa: ASYNC110 - no event of another process
            await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    folder, prometheus = tmp_path_factory.mktemp("site"), FakePrometheus()
    (folder / "faulty_model.py").write_text(MODEL)
    (folder / "sitecustomize.py").write_text(PROCESS)
    variant = a_variant("only", family="faulty_model:Model", resources={"cpu": "500m", "memory": "256Mi"})
    stage = a_stage("only", "request.inputs.x", variants=[variant], batchSizes=[1, 2, 4, 8], pin={"replicas": 2})
    pipeline, edge = folder / "pipeline.yaml", folder / "edge.yaml"
    pipeline.write_text(yaml.safe_dump(a_pipeline_document([stage], budget={"cores": "2"}, slo={"latency": SLO})))
    authority = Authority(folder / "ca").begin()
    identity = Holder(folder / "identity").take(authority, authority)
    edge.write_text(dump_yaml(EdgeSettings(replicas=identity.identity("shared"))))
    app = web.Application()
    app.router.add_get("/{path:.*}", prometheus.answer)
    async with AsyncExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("FAULTS", str(folder))
        os.environ["PYTHONPATH"] = str(folder)
        server = await stack.enter_async_context(TestServer(app))
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)))
        options = ("--edge", str(edge), "--prometheus", f"http://localhost:{server.port}")
        served = await asyncio.to_thread(
            stack.enter_context, up(folder, *options, run_folder=folder / "run", pipeline=pipeline)
        )
        ports = stack.enter_context(held_port()), stack.enter_context(held_port())
        site = Site(served, folder, pipeline, edge, ports, authority, identity, prometheus, session, stack)
        site.start_router()
        await site.whole()
        yield site


def kill_replica(number: signal.Signals) -> Callable[[Site], Awaitable[None]]:
    async def strike(site: Site) -> None:
        name, pid = min(site.replicas().items())
        os.kill(pid, number)
        await site.whole(without=name)

    return strike


def fail_replica(kind: str) -> Callable[[Site], Awaitable[None]]:
    async def strike(site: Site) -> None:
        name, pid = min(site.replicas().items())
        file = site.folder / str(pid)
        file.write_text(kind)
        await asyncio.sleep(LASTING_SECONDS)
        used = await site.used_replicas()
        file.unlink()
        assert [name in each for each in used] == [False, False], "each router ejects it"

    return strike


async def kill_each_new_replica(site: Site) -> None:
    """As a replica that is out of memory after each start."""
    for _ in range(4):
        name, pid = max(site.replicas().items(), key=lambda item: int(item[0].rpartition("-")[2]))
        os.kill(pid, signal.SIGKILL)
        await site.whole(without=name)


def kill(words: str) -> Callable[[Site], Awaitable[None]]:
    async def strike(site: Site) -> None:
        process = site.process(words)
        process.kill()

        async def is_replaced() -> bool:
            return any(found.pid != process.pid for found in site.served.running(words))

        await eventually(is_replaced)
        await site.whole()

    return strike


async def kill_adapter(site: Site) -> None:
    site.process("trimtab_adapter").kill()
    await site.decided()


async def restart_router(site: Site) -> None:
    """As a rolling update does."""
    site.second_router.terminate()
    await asyncio.to_thread(site.second_router.wait)
    site.start_router()
    await site.whole()


async def poison_documents(site: Site) -> None:
    files = [site.served.folder / name for name in ("plan.json", "endpoints.json")]
    contents = [file.read_text() for file in files]
    for poison in ("{", json.dumps({"spec": {"stages": [{"replicas": "9" * 9999}]}}), "\0" * 2**20):
        for file in files:
            replace(file, poison)
        await asyncio.sleep(1.0)
    for file, content in zip(files, contents, strict=True):
        replace(file, content)
    await site.decided()


async def mislead_prometheus(site: Site) -> None:
    for site.prometheus.mode in ("lying", "absurd", "stale", "gone", "hanging", "well"):
        await asyncio.sleep(CALM_SECONDS)
    await site.decided()


async def hang_name_lookups(site: Site) -> None:
    (site.folder / "dns").touch()
    await asyncio.sleep(LASTING_SECONDS)
    (site.folder / "dns").unlink()
    await site.decided()


async def fill_disk(site: Site) -> None:
    """Every write to a file fails."""
    whole = psutil.Process(site.served.process.pid)
    for bound in (0, RLIM_INFINITY):
        for process in (whole, *whole.children(recursive=True), psutil.Process(site.second_router.pid)):
            process.rlimit(RLIMIT_FSIZE, (bound, RLIM_INFINITY))
        await asyncio.sleep(0 if bound else FULL_DISK_SECONDS)
    await site.decided()


async def spoil_certificates(site: Site) -> None:
    """Certificates of routers and replicas are replaced by expired ones, by those of another authority, and renewed."""
    other = Authority(site.folder / "other", "other").begin()
    for signer, expired in ((site.authority, True), (other, False), (site.authority, False)):
        site.identity.take(signer, site.authority, expired=expired)
        await asyncio.sleep(CALM_SECONDS)


async def shift_clocks(site: Site) -> None:
    for hours in (1, -1, 0):
        replace(site.folder / "clock", str(hours * HOUR_SECONDS))
        await asyncio.sleep(CALM_SECONDS)
    await site.decided()


@pytest.mark.parametrize(
    ("strike", "bound_seconds"),
    [
        pytest.param(kill_replica(signal.SIGKILL), START_SECONDS, id="replica_dies"),
        pytest.param(kill_replica(signal.SIGSTOP), START_SECONDS, id="replica_hangs"),
        pytest.param(fail_replica("error"), ANSWER_SECONDS, id="replica_answers_500"),
        pytest.param(fail_replica("slow"), ANSWER_SECONDS, id="replica_is_slow"),
        pytest.param(kill_each_new_replica, START_SECONDS, id="replicas_die_again_and_again"),
        pytest.param(kill("trimtab_router "), START_SECONDS, id="router_dies"),
        pytest.param(restart_router, START_SECONDS, id="router_restarts"),
        pytest.param(kill("/envoy"), START_SECONDS, id="envoy_dies"),
        pytest.param(kill_adapter, START_SECONDS, id="adapter_dies"),
        pytest.param(poison_documents, ANSWER_SECONDS, id="poisonous_documents"),
        pytest.param(mislead_prometheus, ANSWER_SECONDS, id="prometheus_is_wrong"),
        pytest.param(hang_name_lookups, ANSWER_SECONDS, id="name_lookups_hang"),
        pytest.param(fill_disk, ANSWER_SECONDS, id="disk_is_full"),
        pytest.param(spoil_certificates, ANSWER_SECONDS, id="certificates_are_wrong"),
        pytest.param(shift_clocks, ANSWER_SECONDS, id="clocks_jump"),
    ],
)
async def test_fault(
    site: Site, strike: Callable[[Site], Awaitable[None]], bound_seconds: float, figures: Figures
) -> None:
    await site.whole()
    callers = Callers(site.addresses, SLO_SECONDS)
    moments = await send_through(callers, partial(strike, site), site.whole, CALM_SECONDS)
    began, whole = moments.began, moments.whole
    if bound_seconds == START_SECONDS:  # the fault ends once another process serves
        callers.report(figures, began, bound_seconds, whole - began)
    else:  # the fault lasts until it is mended
        callers.report(figures, began, bound_seconds)
        figures.require(
            "share not in time after 5 s",
            callers.bad_share(began + ANSWER_SECONDS),
            "<=",
            MAX_BAD_SHARE,
            depends_on_load=True,
        )
        figures.require("seconds until it is used again", whole - moments.struck, "<=", MAX_RETURN_SECONDS)
