"""A model server in a pod: models from the environment, draining, termination log."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.builders import a_pipeline
from tests.model_servers.clients import a_request, call, x
from tests.processes import held_port
from tests.router.envoy.openssl import Authority, Holder
from trimtab_pipelines.model_spec import MAX_BODY_BYTES, ModelSpec, model_spec, split_variable
from trimtab_pipelines.processes.child_process import ReplicaPorts
from trimtab_protocol.mutual_tls import MutualTls

NOWHERE = json.dumps({"certificate": "/nowhere/tls.crt", "key": "/nowhere/tls.key", "ca": "/nowhere/ca.crt"})
ANY_PORTS = ("--data-port", "0", "--http-port", "0", "--grpc-port", "0")


def models(*specs: ModelSpec) -> str:
    return json.dumps([spec.model_dump(mode="json", by_alias=True, exclude_none=True) for spec in specs])


def a_spec() -> ModelSpec:
    pipeline = a_pipeline()
    stage = pipeline.spec.stages[0]
    return model_spec(pipeline, Path("/opt/trimtab/pipelines/sample"), stage, stage.variants[0], 0.25)


async def status(session: aiohttp.ClientSession, port: int, path: str) -> int:
    async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
        return answer.status


async def start_pod(*options: str, **environment: str) -> tuple[asyncio.subprocess.Process, ReplicaPorts]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trimtab_model_servers", "--models-env", "MODELS", *ANY_PORTS, *options),
        env=os.environ | environment | {"MODELS": models(a_spec())},
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    return process, ReplicaPorts(**json.loads(await process.stdout.readline()))


@pytest.mark.timeout(300)
async def test_pod_drains_until_requests_stop(tmp_path: Path):
    process, ports = await start_pod("--drain-seconds", "5", "--host", "0.0.0.0", TMPDIR=str(tmp_path))
    request = a_request("small", x([[1.0] * 4]))
    async with aiohttp.ClientSession() as session:
        assert await status(session, ports.data_port, "/v2/health/ready") == 200
        await refuses_what_is_too_large(session, ports.http_port)
        await only_the_data_port_listens_to_others(ports)

        process.send_signal(signal.SIGTERM)
        while await status(session, ports.data_port, "/v2/health/ready") == 200:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
        for _ in range(12):
            assert (await call(session, ports, request)).y.tolist() == [[2.0] * 4]
            await asyncio.sleep(0.5)
        assert await status(session, ports.data_port, "/v2/models/small/ready") == 200
    assert await asyncio.wait_for(process.wait(), 100) == 0
    assert not await asyncio.to_thread(lambda: list(tmp_path.glob("trimtab-*")))


@pytest.mark.timeout(300)
async def test_health_and_metrics_ports_serve_only_those_in_plain_http(tmp_path: Path):
    """The kubelet has no certificate to show."""
    authority = Authority(tmp_path / "ca").begin()
    identity = Holder(tmp_path / "tls").take(authority, authority).identity()
    with held_port() as health, held_port() as metrics:
        options = ("--identity", identity.model_dump_json(), "--health-port", str(health))
        process, ports = await start_pod(*options, "--metrics-port", str(metrics))
    unserved = ("/v2", "/v2/models/small", "/v2/models/small/ready", "/v2/health/ready/../../models", "/v2/health/")
    async with aiohttp.ClientSession() as session:
        for path in ("/v2/health/live", "/v2/health/ready"):
            assert await status(session, health, path) == 200
            assert await status(session, metrics, path) == 404
        for path in unserved:
            assert await status(session, health, path) == await status(session, metrics, path) == 404
        async with session.get(f"http://127.0.0.1:{metrics}/metrics") as answer:
            assert (answer.status, answer.headers["Connection"]) == (200, "close")
            assert "# TYPE trimtab_pending_prefill_tokens gauge" in await answer.text()
        async with session.post(f"http://127.0.0.1:{metrics}/metrics", data=b"x") as answer:
            assert answer.status == 404
        with pytest.raises(aiohttp.ClientError):
            await status(session, ports.data_port, "/v2/health/live")
        shown = MutualTls(identity).client_context()
        async with session.get(f"https://127.0.0.1:{ports.data_port}/v2/models/small/ready", ssl=shown) as answer:
            assert answer.status == 200
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 100) == 0


async def only_the_data_port_listens_to_others(ports: ReplicaPorts) -> None:
    """MLServer's own ports load and unload models for anybody."""
    (await asyncio.open_connection("127.0.0.2", ports.data_port))[1].close()
    for port in (ports.http_port, ports.grpc_port):
        (await asyncio.open_connection("127.0.0.1", port))[1].close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.2", port)


async def refuses_what_is_too_large(session: aiohttp.ClientSession, http_port: int) -> None:
    """MLServer's own REST port, with a size said beforehand and without."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield bytes(2**20)

    url = f"http://127.0.0.1:{http_port}/v2/models/small/infer"
    async with session.post(url, data=pieces(), headers={"Content-Type": "application/json"}) as answer:
        assert answer.status == 413
        assert f"send at most {MAX_BODY_BYTES} bytes" in (await answer.json())["error"]
    reader, writer = await asyncio.open_connection("127.0.0.1", http_port)
    head = f"POST /v2/models/small/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n"
    writer.write(head.encode())
    assert b" 413 " in await reader.readline()
    writer.close()
    await writer.wait_closed()


LARGE = [a_spec().replace(name=f"v{number}", family="f" * 3000) for number in range(64)]
"""More than Linux passes in one environment variable."""


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "MODELS is not set; it must hold a JSON list of models"),
        ("[]", "it holds: []"),
        ('[{"name": "small"}]', "MODELS: 0.family: Field required"),
        (models(a_spec(), a_spec()), "it holds: ['small', 'small']"),
        (models(a_spec()), "identity: certificate /nowhere/tls.crt with key /nowhere/tls.key: "),
        (models(*LARGE), "identity: certificate /nowhere/tls.crt with key /nowhere/tls.key: "),
    ],
)
def test_pod_reports_failure_in_one_line(value, reason):
    environment = {name: text for name, text in os.environ.items() if name != "MODELS"}
    ended = subprocess.run(
        [sys.executable, "-m", "trimtab_model_servers", "--models-env", "MODELS", "--identity", NOWHERE],
        env=environment | ({} if value is None else split_variable("MODELS", value)),
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.returncode == (1 if reason.startswith("identity") else 2)
    assert reason in ended.stderr
    assert ended.stderr.count("\n") == 1
