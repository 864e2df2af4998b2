"""How replicas come and go."""

import asyncio
import json
import re
import signal
import subprocess
import sys

import aiohttp
import pytest

from tests.builders import a_pipeline, a_stage, a_variant
from tests.model_servers.clients import a_request, call, x
from tests.model_servers.conftest import Replica, write_echoes
from trimtab_model_servers.ports import ReservedPort
from trimtab_model_servers.settings import write_model_folder


def test_a_fork_starts_quickly(start, tmp_path):
    write_model_folder(a_pipeline(), tmp_path, "stage-0", ["small"], tmp_path, cores=1)
    replicas = [start(tmp_path) for _ in range(3)]
    assert all(isinstance(replica, Replica) for replica in replicas), replicas
    assert min(replica.start_seconds for replica in replicas) < 1.5
    ports = [port for replica in replicas for port in replica.ports.as_dict().values()]
    assert len(set(ports)) == len(ports)


async def test_a_replica_told_to_stop_finishes_the_batch_in_hand(start, tmp_path):
    replica = start(write_echoes(tmp_path))
    async with aiohttp.ClientSession() as session:
        in_hand = asyncio.create_task(call(session, replica.ports, a_request("slow", x([[1.0]]))))
        await asyncio.sleep(0.2)  # the batch is under way
        replica.terminate()
        await asyncio.sleep(0.1)  # the signal has arrived
        late = await call(session, replica.ports, a_request("quick", x([[1.0]])))
        assert (late.status, late.error) == (503, "this replica is shutting down; send the batch to another one")
        async with session.get(f"http://127.0.0.1:{replica.ports.data_port}/v2/health/ready") as answer:
            assert answer.status == 503
        assert (await in_hand).y.tolist() == [[2.0]]
    replica.process.join(timeout=10)
    assert replica.process.exitcode == 0


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({"family": "digits/reader", "storageUri": "absent.safetensors"}, "model small: .*absent.safetensors: no such"),
        ({"family": "absent"}, "model small: unknown family 'absent'; there are: digits/locator"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_the_reason(start, tmp_path, variant, message):
    stage = a_stage(variants=[a_variant("good"), a_variant("small", **variant)])
    write_model_folder(a_pipeline([stage]), tmp_path, "first", ["good", "small"], tmp_path, cores=1)
    reason = start(tmp_path)
    assert isinstance(reason, str)
    assert re.search(message, reason), reason


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "model-settings.json: Expecting value"),
        ('{"name": "small"}', "model-settings.json: .*implementation"),
        (
            '{"name": "small", "implementation": "trimtab_model_servers.runtime.TorchRuntime"}',
            "model small: parameters.extra is missing",
        ),
        (
            (
                '{"name": "small", "implementation": "trimtab_model_servers.runtime.TorchRuntime", '
                '"parameters": {"extra": {"name": "small"}}}'
            ),
            "model small: model-settings.json: parameters.extra.family: Field required",
        ),
        (None, "holds no model; expected NAME/model-settings.json"),
    ],
)
def test_settings_that_cannot_be_read_are_the_reason(start, tmp_path, content, message):
    if content is not None:
        (tmp_path / "small").mkdir()
        (tmp_path / "small" / "model-settings.json").write_text(content)
    reason = start(tmp_path)
    assert isinstance(reason, str)
    assert re.search(message, reason), reason


def test_the_command_prints_its_ports_or_one_line_of_reason(tmp_path):
    good = write_echoes(tmp_path / "good")
    bad = tmp_path / "bad"
    bad.mkdir()
    command = [sys.executable, "-m", "trimtab_model_servers"]
    with (
        subprocess.Popen([*command, good], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as served,
        subprocess.Popen([*command, bad], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as failed,
    ):
        assert served.stdout is not None
        assert set(json.loads(served.stdout.readline())) == {"data_port", "http_port", "grpc_port"}
        served.send_signal(signal.SIGTERM)
        out, error = served.communicate(timeout=20)
        assert (served.returncode, out, error) == (0, "", "")
        out, error = failed.communicate(timeout=60)
        assert (failed.returncode, out) == (1, "")
        assert error == f"trimtab_model_servers: {bad} holds no model; expected NAME/model-settings.json\n"


def test_reserved_ports_are_unlike():
    with ReservedPort("127.0.0.1") as first, ReservedPort("127.0.0.1") as second, ReservedPort("127.0.0.1") as third:
        assert len({first.number, second.number, third.number}) == 3
