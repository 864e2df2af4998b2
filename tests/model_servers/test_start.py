"""Settings of replicas, and their start and stop."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import psutil
import pytest

from tests.builders import a_pipeline, a_stage, a_variant
from tests.model_servers.clients import a_request, call, call_mlserver_grpc, x
from tests.model_servers.conftest import Gate, serve_gated, write_echoes
from trimtab_model_servers.families.registry import modules_to_preload
from trimtab_model_servers.server.mlserver_setup import ReservedPort
from trimtab_model_servers.server.settings import write_model_folder
from trimtab_pipelines.model_spec import ModelSpec
from trimtab_pipelines.processes.forked_process import fork_server, start_forked


async def test_stopped_replica_finishes_its_batch(start, tmp_path):
    replica, gate = start(write_echoes(tmp_path), serve_gated), Gate(tmp_path)
    ready = f"http://127.0.0.1:{replica.ports.data_port}/v2/health/ready"
    gate.shut()
    async with aiohttp.ClientSession() as session:
        in_hand = asyncio.create_task(call(session, replica.ports, a_request("slow", x([[1.0]]))))
        await gate.begun()
        replica.terminate()
        while await status_of(session, ready) == 200:  # noqa: ASYNC110 - no event tells that the signal has arrived
            await asyncio.sleep(0.01)
        late = await call(session, replica.ports, a_request("quick", x([[1.0]])))
        assert (late.status, late.error) == (503, "this replica is shutting down; send the batch to another one")
        assert await status_of(session, ready) == 503
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call_mlserver_grpc(replica.ports, a_request("quick", x([[1.0]])))
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        gate.open()
        assert (await in_hand).y.tolist() == [[2.0]]
    replica.process.join(timeout=60)
    assert replica.process.exitcode == 0


async def status_of(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(url) as answer:
        return answer.status


def test_model_that_cannot_be_loaded_is_reported(start, tmp_path):
    unusable = a_variant("small", family="digits/reader", storageUri="absent.safetensors")
    stage = a_stage(variants=[a_variant("good"), unusable])
    write_model_folder(a_pipeline([stage]), tmp_path, "first", ["good", "small"], tmp_path, cores=1)

    assert re.search("model small: .*absent.safetensors: no such", start(tmp_path))


SETTINGS = '{"name": "small", "implementation": "trimtab_model_servers.server.runtime.TorchRuntime"'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "model-settings.json: Expecting value"),
        ('{"name": "small"}', "model-settings.json: .*implementation"),
        (SETTINGS + "}", "model small: parameters.extra is missing"),
        (SETTINGS + ', "parameters": {"extra": {"name": "small"}}}', "parameters.extra.family: Field required"),
        (None, "holds no model; expected NAME/model-settings.json"),
    ],
)
def test_unreadable_settings_are_reported(start, tmp_path, content, message):
    if content is not None:
        (tmp_path / "small").mkdir()
        (tmp_path / "small" / "model-settings.json").write_text(content)

    assert re.search(message, start(tmp_path))


def test_the_command_prints_its_ports(tmp_path):
    """Beside it, what plain MLServer makes of the same folder; both at once, since importing torch takes long."""
    write_echoes(tmp_path)
    command = [sys.executable, "-m", "trimtab_model_servers", tmp_path]
    with (
        ReservedPort("127.0.0.1") as data_port,
        plain_mlserver(tmp_path, data_port.number) as plain,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as served,
    ):
        assert served.stdout is not None
        assert set(json.loads(served.stdout.readline())) == {"data_port", "http_port", "grpc_port"}
        served.send_signal(signal.SIGTERM)
        out, error = served.communicate(timeout=120)
        assert (served.returncode, out, error) == (0, "", "")
        assert eventually_ready(data_port.number)["parameters"]["family"] == "echo"
        plain.terminate()
        plain.communicate(timeout=120)


def plain_mlserver(folder: Path, data_port: int) -> "subprocess.Popen[str]":
    ports = {"MLSERVER_HTTP_PORT": "0", "MLSERVER_GRPC_PORT": "0", "TRIMTAB_DATA_PORT": str(data_port)}
    return subprocess.Popen(
        [Path(sys.executable).parent / "mlserver", "start", folder],
        env=os.environ | ports,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def eventually_ready(data_port: int) -> Any:
    deadline = time.monotonic() + 240
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{data_port}/v2/models/quick") as answer:
                return json.load(answer)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_reserved_ports_are_unlike():
    with ReservedPort("127.0.0.1") as first, ReservedPort("127.0.0.1") as second, ReservedPort("127.0.0.1") as third:
        assert len({first.number, second.number, third.number}) == 3


def written(pipeline, folder, stage="first", cores=1.0):
    """MLServer's settings of the variant `small` of a stage."""
    write_model_folder(pipeline, folder, stage, ["small"], folder / "out", cores=cores)
    return json.loads((folder / "out" / "small" / "model-settings.json").read_text())


def test_stage_reads_outputs_of_the_previous_stage(tmp_path):
    first = a_stage("first", outputs=[{"name": "crops", "datatype": "UINT8", "shape": [1, 28, 28]}])
    second = a_stage("second", inputs=[{"name": "crop", "from": "first.outputs.crops", "optional": True}])
    settings = written(a_pipeline([first, second]), tmp_path, "second", cores=0.5)
    assert settings["inputs"] == [{"name": "crop", "datatype": "UINT8", "shape": [-1, 1, 28, 28]}]
    spec = ModelSpec.model_validate(settings["parameters"]["extra"])
    assert spec.inputs[0].optional
    assert spec.threads == 1


@pytest.mark.parametrize(
    ("uri", "resolved"),
    [
        ("weights/a.safetensors", "{folder}/weights/a.safetensors"),
        ("/abs/a.safetensors", "/abs/a.safetensors"),
        ("s3://bucket/a.safetensors", "s3://bucket/a.safetensors"),
    ],
)
def test_relative_weights_are_resolved_from_the_pipeline(tmp_path, uri, resolved):
    settings = written(a_pipeline([a_stage(variants=[a_variant(storageUri=uri)])]), tmp_path)
    assert settings["parameters"]["uri"] == resolved.format(folder=tmp_path)


@pytest.mark.parametrize(("cores", "threads"), [(0.25, 1), (1, 1), (1.9, 1), (2, 2), (4, 4)])
def test_threads_are_the_whole_cores(tmp_path, cores, threads):
    settings = written(a_pipeline(), tmp_path, "stage-0", cores)
    assert ModelSpec.model_validate(settings["parameters"]["extra"]).threads == threads


def test_unknown_variant_lists_the_variants(tmp_path):
    with pytest.raises(KeyError, match="no variant 'huge'; it has: small"):
        write_model_folder(a_pipeline(), tmp_path, "stage-0", ["huge"], tmp_path, cores=1)


PRELOAD = """
from tests.builders import a_pipeline
from trimtab_model_servers.families.registry import modules_to_preload
print(*modules_to_preload(a_pipeline()))
"""
PRELOADED = "trimtab_model_servers.server.replica trimtab_model_servers.families.echo\n"


@pytest.mark.parametrize(
    ("code", "output"), [("import trimtab_model_servers.server.settings", ""), (PRELOAD, PRELOADED)]
)
def test_process_that_starts_replicas_needs_no_torch(code, output):
    code += "\nimport sys; print({'torch', 'mlserver'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == output + "set()\n"


def test_server_imports_torch_only_with_a_family_of_torch():
    code = "import sys, trimtab_model_servers.server.replica, trimtab_model_servers.families.echo\n"
    code += "print({'torch', 'transformers', 'PIL', 'tokenizers', 'pandas', 'opentelemetry'} & sys.modules.keys())\n"
    code += "import pandas; print(pandas.DataFrame({'x': [1]}).shape)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n(1, 1)\n"


THREADS = """
import json, os, sys, threading
import torch
threads = len(os.listdir("/proc/self/task")), threading.active_count()
print(json.dumps([*threads, torch.cuda.is_initialized(), torch.ones(4).sum().item()]), flush=True)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux adopts orphans")
async def test_imports_of_families_start_no_thread_and_no_cuda(tmp_path):
    (tmp_path / "threads.py").write_text(THREADS)
    chat = a_stage(variants=[a_variant(family="lmm-digits/colocated"), a_variant("other", family="my.module:Family")])
    process = await start_forked(
        "threads",
        [],
        tmp_path / "log",
        "it",
        imports=modules_to_preload(a_pipeline([chat])),
        environment={"PYTHONPATH": str(tmp_path)},
    )
    line = await process.read_line()

    assert json.loads(line or "null") == [1, 1, False, 4.0], (tmp_path / "log").read_text()
    assert psutil.Process(fork_server().pid).num_threads() == 1
    assert await process.wait() == 0
