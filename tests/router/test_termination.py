"""Router process from start to end: after SIGTERM it is not ready, serves on, and answers all requests."""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import yaml

from tests.builders import a_plan
from tests.router.fakes import FakeReplica, a_pipeline, a_request, an_envoy, endpoints_of
from trimtab.local.envoy_process import make_sockets
from trimtab_loadtester.clients import Client, RestClient
from trimtab_loadtester.grpc_client import GrpcClient
from trimtab_pipelines.documents import dump_yaml, write_json
from trimtab_pipelines.endpoints import Endpoints
from trimtab_router.envoy.sockets import Sockets
from trimtab_router.ingress.listeners import Listeners
from trimtab_router.router import Router

PIPELINE = a_pipeline(1)


@dataclass
class Running:
    """A router process and where it listens."""

    process: asyncio.subprocess.Process
    sockets: Sockets
    admin_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"


@asynccontextmanager
async def a_process(
    folder: Path, *options: str, stored: Endpoints | None = None, **environment: str
) -> AsyncIterator[Running]:
    (folder / "pipeline.yaml").write_text(dump_yaml(PIPELINE))
    write_json(folder / "plan.json", a_plan(PIPELINE, 7))
    sockets = make_sockets()
    if stored is not None:
        write_json(sockets.endpoints_file, stored)
    files = ["--pipeline", str(folder / "pipeline.yaml"), "--plan", str(folder / "plan.json")]
    files += ["--sockets", str(sockets.folder)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trimtab_router", *files, *options),
        env=os.environ | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    line = await process.stdout.readline()
    try:
        yield Running(process, sockets, json.loads(line)["admin_port"])
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
        shutil.rmtree(sockets.folder)


async def until_status(session: aiohttp.ClientSession, url: str, status: int) -> None:
    async with asyncio.timeout(20):
        while True:
            async with session.get(url) as answer:
                if answer.status == status:
                    return
            await asyncio.sleep(0.02)


async def send_until_gone(wire: Client, codes: list[str]) -> None:
    request = a_request(parameters={"timeout": 20_000_000})
    encoded = wire.encode(request.inputs, ("y",), request.parameters)
    async with wire:
        while not codes or codes[-1] in {"200", "OK"}:
            codes.append((await wire.send(encoded, str(len(codes)))).code)


async def test_terminating_router_serves_new_requests(tmp_path: Path):
    replica = FakeReplica(delay_seconds=0.01)
    await replica.start()
    write_json(tmp_path / "endpoints.json", endpoints_of({"stage-0": [replica]}))
    options = ("--endpoints", str(tmp_path / "endpoints.json"), "--linger-seconds", "5")
    async with (
        a_process(tmp_path, *options) as router,
        an_envoy(PIPELINE, router.sockets) as door,
        aiohttp.ClientSession() as session,
    ):
        await until_status(session, f"{router.url}/v2/health/ready", 200)
        rest_codes: list[str] = []
        grpc_codes: list[str] = []
        sending = asyncio.gather(
            send_until_gone(RestClient(f"127.0.0.1:{door.rest_port}", "sample"), rest_codes),
            send_until_gone(GrpcClient(f"127.0.0.1:{door.grpc_port}", "sample"), grpc_codes),
        )
        await replica.arrived.wait()
        router.process.send_signal(signal.SIGTERM)
        await until_status(session, f"{router.url}/v2/health/ready", 503)
        body = [len(codes) for codes in (rest_codes, grpc_codes)]
        await sending

        assert await router.process.wait() == 0
        further = [len(codes) - 1 - before for codes, before in zip((rest_codes, grpc_codes), body, strict=True)]
        assert min(further) > 5, "hardly any was served while the router lingered"
        assert set(rest_codes[:-1]) == {"200"}
        assert set(grpc_codes[:-1]) == {"OK"}
        # Connections accepted by the kernel only are reset when the port closes.
        assert rest_codes[-1] in {"503", "ConnectionRefused", "ConnectionLost"}
        assert grpc_codes[-1] in {"UNAVAILABLE", "ConnectionLost"}
        answered = len(rest_codes) + len(grpc_codes) - 2
        assert sum(batch.rows for batch in replica.seen) == answered, "a request was taken, and never answered"
    await replica.stop()


class DrainRecorder(Router):
    """A router that records its drain timeout."""

    drain_seconds: float | None = None

    async def drain(self, timeout_seconds: float) -> None:
        self.drain_seconds = timeout_seconds
        await super().drain(timeout_seconds)


@pytest.mark.parametrize(("latency", "seconds"), [("400ms", 30.0), ("60s", 60.0), ("1h", 600.0)])
async def test_draining_router_answers_within_the_slo(latency: str, seconds: float):
    pipeline = a_pipeline(1, slo={"latency": latency})
    router = DrainRecorder(pipeline, a_plan(pipeline))
    await Listeners(router).close()

    assert router.drain_seconds == seconds


async def test_a_router_starts_from_its_files_without_an_api_server(tmp_path: Path):
    """Of the last known replicas it uses those that respond."""
    cluster = {"server": "https://127.0.0.1:9", "insecure-skip-tls-verify": True}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "gone", "cluster": cluster}],
        "users": [{"name": "anonymous", "user": {"token": "none"}}],
        "contexts": [{"name": "gone", "context": {"cluster": "gone", "user": "anonymous"}}],
        "current-context": "gone",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(content))
    options = ("--cluster", "--namespace", "shop", "--linger-seconds", "0")
    replica = FakeReplica()
    await replica.start()
    gone = replica.endpoint().replace(name="gone", address="127.0.0.1:9")
    stored = Endpoints(stages={"stage-0": (replica.endpoint(), gone)})
    async with (
        a_process(tmp_path, *options, stored=stored, KUBECONFIG=str(tmp_path / "kubeconfig")) as router,
        aiohttp.ClientSession() as session,
    ):
        await until_status(session, f"{router.url}/v2/health/ready", 200)
        async with session.get(f"{router.url}/trimtab/v1/state") as answer:
            state = await answer.json()
        async with session.get(f"{router.url}/metrics") as answer:
            metrics = await answer.text()
        router.process.send_signal(signal.SIGTERM)

        assert await router.process.wait() == 0
        assert (state["plan_generation"], state["ready"]) == (7, True)
        assert state["stages"]["stage-0"]["ready_replicas"] == 1
        assert 'trimtab_plan_generation{namespace="shop",pipeline="sample"} 7.0' in metrics
    await replica.stop()


async def test_process_writes_plain_json_audit_lines(tmp_path: Path):
    write_json(tmp_path / "endpoints.json", endpoints_of({"stage-0": []}))
    async with (
        a_process(tmp_path, "--endpoints", str(tmp_path / "endpoints.json")) as router,
        aiohttp.ClientSession() as session,
    ):
        async with session.delete(f"{router.url}/stop") as answer:
            assert answer.status == 404
        router.process.terminate()
        _, errors = await router.process.communicate()

    lines = [json.loads(line) for line in errors.decode().splitlines() if line.startswith("{")]
    assert [(line["method"], line["path"]) for line in lines] == [("DELETE", "/stop")]


@pytest.mark.parametrize(
    ("pipeline", "options", "code", "reason"),
    [
        (dump_yaml(PIPELINE), (), 2, "one of the arguments --endpoints --cluster is required"),
        (dump_yaml(PIPELINE), ("--cluster",), 1, "no Kubernetes credentials"),
        ("kind: InferencePipeline\n", ("--endpoints=e.json",), 2, "pipeline.yaml: metadata: Field required; spec:"),
    ],
)
async def test_process_that_cannot_start_says_why(tmp_path: Path, pipeline, options, code, reason):
    (tmp_path / "pipeline.yaml").write_text(pipeline)
    files = ["--no-proxy", "--pipeline", str(tmp_path), "--plan", str(tmp_path / "plan.json")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trimtab_router", *files, *options),
        env=os.environ | {"KUBECONFIG": str(tmp_path / "absent")},
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()

    assert process.returncode == code
    assert reason in said.decode()
