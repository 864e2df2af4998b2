"""Envoy with TLS and API keys: keys, serving and loads."""

import asyncio
import json
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.pipelines import echo_plan, write_echo_pipeline
from tests.router.envoy.openssl import Authority, Holder
from trimtab.app import run
from trimtab.local.load_process import LoadOptions, LoadProcess
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_loadtester.clients import Access
from trimtab_loadtester.results import Results
from trimtab_pipelines.documents import dump_yaml
from trimtab_pipelines.edge_settings import EdgeSettings, EdgeTls
from trimtab_pipelines.request_outcome import RequestOutcome
from trimtab_router.envoy.api_keys import key_digest, read_file

BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}


def test_new_key_is_printed_with_its_hash(capsys):
    assert run(["keys", "new", "alice", "--pipeline", "sample", "--pipeline", "other"]) == 0
    output = capsys.readouterr().out
    key = output.split("\n", 1)[0]
    assert output.count(key) == 1
    assert re.fullmatch(r"tt_\S{43}", key)
    line = next(line for line in output.splitlines() if line.startswith("    alice:"))
    (found,) = read_file(line).keys
    assert (found.client, found.digest, found.pipelines) == ("alice", key_digest(key), frozenset({"sample", "other"}))
    create, patch = (shlex.split(line) for line in output.splitlines() if line.startswith("    kubectl"))
    assert create[-1] == f"--from-literal=alice={line.partition(': ')[2]}"
    assert patch[:4] == ["kubectl", "patch", "secret", "trimtab-keys"]
    assert run(["keys", "new", "bob"]) == 0
    assert re.search(r"    bob: sha256:[0-9a-f]{64} \*\n", capsys.readouterr().out)


@pytest.mark.parametrize(("arguments", "named"), [(["a b"], "'a b'"), (["alice", "--pipeline", "No Name"], "No Name")])
def test_key_for_an_invalid_name_is_rejected(capsys, arguments, named):
    assert run(["keys", "new", *arguments]) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert not captured.out


def test_load_without_credentials_is_rejected(tmp_path, capsys):
    file = write_echo_pipeline(tmp_path)
    (tmp_path / "edge.yaml").write_text(dump_yaml(EdgeSettings(keys_file=str(tmp_path / "keys"))))
    assert run(["up", str(file), "--edge", str(tmp_path / "edge.yaml"), "--load", "constant:1", "--duration", "1"]) == 2
    assert "--api-key-file" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "two words", "two\nlines", "kéy"])
def test_invalid_key_file_is_named(tmp_path, content):
    (tmp_path / "key").write_text(content)
    with pytest.raises(ValueError, match=r"/key: expected only a key"):
        _ = Access(api_key_file=tmp_path / "key").headers


async def test_loadtest_passes_tls_and_keys(tmp_path, capsys):
    authority = Authority(tmp_path / "ca").begin()
    authority.issue("door", tmp_path / "tls.crt", tmp_path / "tls.key")
    assert run(["keys", "new", "loadtester"]) == 0
    output = capsys.readouterr().out
    key_file, keys = tmp_path / "key", tmp_path / "keys"
    key_file.write_text(output.split("\n", 1)[0] + "\n")
    key_file.chmod(stat.S_IRUSR)
    keys.write_text(next(line for line in output.splitlines() if line.startswith("    loadtester:")) + "\n")
    tls = EdgeTls(certificate=str(tmp_path / "tls.crt"), key=str(tmp_path / "tls.key"))
    edge = tmp_path / "edge.yaml"
    edge.write_text(dump_yaml(EdgeSettings(tls=tls, keys_file=str(keys))))
    pipeline = write_echo_pipeline(tmp_path, slo={"latency": "20s"})
    setup = Setup(pipeline, tmp_path / "run", plan=echo_plan(), edge=edge)
    async with Supervisor(setup) as local:
        await local.ready()
        secured = ("--ca", str(authority.file), "--api-key-file", str(key_file))
        for protocol, port in (("REST", local.rest_port), ("gRPC", local.grpc_port)):
            arguments = f"--address 127.0.0.1:{port} --protocol {protocol} --load constant:10 --duration 0.5".split()
            sent = await load(pipeline, *arguments, *secured)
            assert sent["ok"] + sent["late"] == sent["received"] > 0, sent
            assert (await load(pipeline, *arguments, "--ca", str(authority.file), exit_code=1))["ok"] == 0
        results = await send_from_process(
            pipeline, f"127.0.0.1:{local.rest_port}", Access(authority.file, key_file), tmp_path
        )
        assert (
            results.count(RequestOutcome.OK) + results.count(RequestOutcome.LATE) == results.summary()["received"] > 0
        )
        assert local.faults == []


async def test_mutual_tls_certificates_can_be_replaced(tmp_path):
    """`trimtab status` names replicas that the router rejects."""
    authority = Authority(tmp_path / "ca").begin()
    holder = Holder(tmp_path / "tls").take(authority, authority)
    edge = tmp_path / "edge.yaml"
    edge.write_text(dump_yaml(EdgeSettings(replicas=holder.identity("shared"))))
    setup = Setup(write_echo_pipeline(tmp_path, slo={"latency": "20s"}), tmp_path / "run", plan=echo_plan(), edge=edge)
    async with Supervisor(setup) as local:
        await local.ready()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{local.rest_port}", trust_env=False) as client:
            for _ in range(2):
                answer = await client.post("/v2/models/sample/infer", json=BODY, timeout=60)
                assert answer.json()["outputs"][0]["data"] == [3.0, 4.0, 5.0, 6.0]
                holder.take(authority, authority)
        assert "certificate reloaded" in (tmp_path / "run" / "logs" / "router.log").read_text()
        assert local.faults == []
        other = Authority(tmp_path / "other", "other").begin()
        holder.take(authority, other)  # what the router trusts now did not sign what the replicas show
        refused = "rejected: its certificate is refused: "
        while refused not in (status := await status_of(local.admin_port)):
            assert "rejected" not in status
        assert re.search(rf"stage (first: replica first|second: replica second)-\d {refused}", status)


async def status_of(port: int) -> str:
    asking = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trimtab", "status", "--port", str(port)), stdout=subprocess.PIPE
    )
    return (await asking.communicate())[0].decode()


async def send_from_process(pipeline: Path, address: str, access: Access, folder: Path) -> Results:
    order = LoadOptions("constant:5", duration_seconds=2, access=access)
    sending = await LoadProcess.start(pipeline, address, order, folder)
    try:
        return await sending.results()
    finally:
        await sending.stop()


async def load(pipeline: Path, *arguments: str, exit_code: int = 0) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "trimtab", "loadtest", str(pipeline), *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output = (await process.communicate())[0].decode()
    assert process.returncode == exit_code, output
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])["figures"]
    return figures
