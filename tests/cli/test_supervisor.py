"""A pipeline of real processes: it serves, follows plans, survives kills and signals, and leaves nothing behind."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import psutil
import pytest
import yaml

from tests.builders import a_pipeline_document, a_plan, a_stage, a_variant
from tests.cli.pipelines import (
    TASK_INPUT,
    a_transformer_pipeline,
    echo_plan,
    echo_profiles,
    write_echo_pipeline,
    write_plan,
)
from tests.loadtester.fake_pipeline import FakePipeline, a_pipeline, rest_server
from tests.model_servers.transformer.test_family import IMAGE, SHAPE
from tests.model_servers.transformer.test_family import weights as weights  # noqa: PLC0414  (a fixture)
from tests.model_servers.transformer.test_task_registry import a_task
from tests.pipelines.test_processes import a_disk_with
from trimtab.app import run
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_pipelines.documents import dump_yaml, load_pipeline
from trimtab_pipelines.processes.child_process import ChildProcess, StartError
from trimtab_profiler.identity import this_machine
from trimtab_router.envoy.api_keys import HashedKey, format_entry, key_digest, new_key

BODY = {
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}],
    "parameters": {"timeout": 60_000_000},
}
PATIENCE_SECONDS = 120.0


async def until(holds: Callable[[], bool], what: str, beside: "asyncio.Task[None] | None" = None) -> None:
    """Poll a condition until it holds; fail if the task `beside` fails or the time is over."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        if beside is not None and beside.done():
            beside.result()
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        await asyncio.sleep(0.02)


async def infer(client: httpx.AsyncClient) -> dict[str, Any]:
    response = await client.post("/v2/models/sample/infer", json=BODY)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["outputs"][0]["data"] == [3.0, 4.0, 5.0, 6.0]
    return answer


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[Supervisor]:
    setup = Setup(write_echo_pipeline(tmp_path), tmp_path / "run", plan=echo_plan())
    async with Supervisor(setup) as running:
        await running.ready()
        yield running


@pytest.fixture
async def client(local: Supervisor) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{local.rest_port}", timeout=90, trust_env=False
    ) as running:
        yield running


async def test_supervisor_follows_plans_and_survives_kills(local: Supervisor, client: httpx.AsyncClient) -> None:
    """No request fails during changes of variant and replicas, a killed replica and an invalid plan."""
    answered, stop = [], asyncio.Event()

    async def keep_asking() -> None:
        while not stop.is_set():
            answered.append((await infer(client))["parameters"]["trimtab.first.variant"])

    asking = asyncio.create_task(keep_asking())
    await until(lambda: len(answered) > 3, "requests are answered", asking)
    starts = local.replica_manager.starts
    write_plan(local.plan_file, echo_plan("slow", generation=2))
    await until(lambda: answered[-1] == "slow", "the router uses the other variant", asking)
    assert local.replica_manager.starts == starts, "both variants are loaded, so no replica starts"

    write_plan(local.plan_file, echo_plan("slow", replicas=2, generation=3))
    await until(
        lambda: local.replica_manager.settled and len(local.replica_manager.pids) == 4, "there are two replicas a stage"
    )
    write_plan(local.plan_file, echo_plan("slow", replicas=1, generation=4))
    await until(
        lambda: local.replica_manager.settled and len(local.replica_manager.pids) == 2,
        "there is one replica a stage again",
    )

    local.plan_file.write_text("{")
    victims = dict(local.replica_manager.pids)
    for pid in victims.values():
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not victims.keys() & local.replica_manager.pids.keys(), "the deaths are seen")
    await until(lambda: local.replica_manager.settled, "others replace them")
    seen = len(answered)
    await until(lambda: len(answered) > seen + 3, "they serve", asking)
    stop.set()
    await asking
    assert local.replica_manager.site.limit_cores == 2
    assert sorted(fault.what for fault in local.faults) == sorted(f"replica {name} ended" for name in victims)
    counters = await local.client.counters()
    assert counters.outcomes["failed"] == 0
    assert counters.received == sum(counters.outcomes.values()) == len(answered)
    for port in (local.rest_port, local.admin_port):
        url = f"http://127.0.0.1:{port}/v2/health/live"
        assert (await client.get(url, headers={"Host": "rebound.example"})).status_code == 403


async def test_hung_replica_is_replaced(local: Supervisor, client: httpx.AsyncClient) -> None:
    await infer(client)
    name, pid = next((name, pid) for name, pid in local.replica_manager.pids.items() if name.startswith("first"))
    os.kill(pid, signal.SIGSTOP)
    asked = time.monotonic()
    await infer(client)
    assert time.monotonic() - asked < 20, "seconds, on a busy machine"
    assert not psutil.pid_exists(pid)
    assert name not in local.replica_manager.pids
    assert [fault.what for fault in local.faults] == [f"replica {name} hung"]
    assert "did not respond" in local.faults[0].detail
    assert (await local.client.counters()).outcomes["failed"] == 0


FATAL_MODEL = '''
import os

import torch


class Model(torch.nn.Module):
    """Adds one; a negative value ends the process."""

    inputs = {"x": ("FP32", (4,))}
    outputs = {"y": ("FP32", (4,))}

    def forward(self, x):
        if x.min() < 0:
            os._exit(3)
        return x + 1
'''


async def test_fatal_row_never_takes_the_last_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fatal_model.py").write_text(FATAL_MODEL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    variant = a_variant("only", family="fatal_model:Model")
    stage = a_stage("only", "request.inputs.x", variants=[variant], batchSizes=[8])
    pipeline = tmp_path / "pipeline.yaml"
    slo = {"latency": "60s"}
    pipeline.write_text(yaml.safe_dump(a_pipeline_document([stage], budget={"cores": "2"}, slo=slo)))
    plan = a_plan(load_pipeline(pipeline), replicas=2, batchSize=8, cores="1")

    async with (
        Supervisor(Setup(pipeline, tmp_path / "run", plan=plan, proxy=False)) as local,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{local.rest_port}", timeout=90, trust_env=False) as client,
    ):

        async def status(value: float) -> int:
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [value] * 4}
            response = await client.post("/v2/models/sample/infer", json=BODY | {"inputs": [tensor]})
            return response.status_code

        await local.ready()
        before = dict(local.replica_manager.pids)
        assert await status(-1.0) == 500
        assert await asyncio.gather(status(-1.0), *map(status, range(8))) == [400] + [200] * 8
        await until(lambda: local.replica_manager.settled, "another replica replaces it")
        assert before.keys() & local.replica_manager.pids.keys(), "one of the two lives on"

        first = asyncio.create_task(status(0.0))
        answers = await asyncio.gather(*map(status, [1.0, 2.0, -2.0, *range(3, 20)]))
        assert answers == [200, 200, 500] + [200] * 17
        assert await first == 200


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_router_is_replaced_on_the_same_port(
    local: Supervisor, client: httpx.AsyncClient, number: signal.Signals
) -> None:
    assert local.router is not None
    pid = local.router.pid
    os.kill(pid, number)
    await until(lambda: local.router is not None and local.router.pid != pid, "another router is started")
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            with suppress(httpx.HTTPError, AssertionError):
                await infer(client)
                break
            await asyncio.sleep(0.05)
    assert ("the router hung" in [fault.what for fault in local.faults]) == (number == signal.SIGSTOP)


async def test_serving_continues_if_the_disk_rejects_writes(local: Supervisor, client: httpx.AsyncClient) -> None:
    """A replica that dies while the disk rejects writes is replaced once it accepts them."""
    name, pid = next(iter(local.replica_manager.pids.items()))
    with a_disk_with(0):
        os.kill(pid, signal.SIGKILL)
        await until(lambda: any("No" in f.what or "large" in f.what for f in local.faults), "the fault is recorded")
    await until(lambda: local.replica_manager.settled and name not in local.replica_manager.pids, "another replaces it")
    await infer(client)


async def test_router_start_error_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        setup = Setup(
            write_echo_pipeline(tmp_path), tmp_path / "run", plan=echo_plan(), rest_port=taken.getsockname()[1]
        )
        with pytest.raises(StartError, match=r"Envoy[\s\S]*Address already in use"):
            async with Supervisor(setup):
                pass
    assert not (tmp_path / "run" / "models").exists()


async def test_replica_start_error_is_reported(tmp_path: Path) -> None:
    document = write_echo_pipeline(tmp_path).read_text().replace("family: echo", "family: ecco")
    (tmp_path / "pipeline.yaml").write_text(document)
    with pytest.raises(StartError, match=r"^model fast: unknown family 'ecco'"):
        async with Supervisor(Setup(tmp_path, tmp_path / "run", plan=echo_plan())) as running:
            await running.ready()


async def test_stopping_router_has_time_to_drain(tmp_path: Path) -> None:
    patience: list[float] = []

    class Patient:
        async def stop(self, patience_seconds: float) -> None:
            patience.append(patience_seconds)

    supervisor = Supervisor(Setup(write_echo_pipeline(tmp_path), tmp_path / "run", plan=echo_plan()))
    slow = supervisor.pipeline.spec.slo.replace(latency_seconds=45.0)
    supervisor.pipeline = supervisor.pipeline.with_spec(slo=slow)
    supervisor.router = cast("ChildProcess", Patient())

    await supervisor.stop()

    assert patience == [45.0]


@contextmanager
def up(tmp_path: Path, *arguments: str) -> Iterator[tuple["subprocess.Popen[str]", list[psutil.Process]]]:
    """Run `trimtab up` until it is ready, from a folder whose modules it must not import; yield it and its children."""
    for module in ("grp", "queue", "numpy", "aiohttp"):
        (tmp_path / f"{module}.py").write_text(f"raise SystemExit('{module} is imported from the working directory')")
    pipeline = write_echo_pipeline(tmp_path)
    plan = write_plan(tmp_path / "given.json", echo_plan())
    command = [str(Path(sys.executable).with_name("trimtab")), "up", str(pipeline), "--plan", str(plan)]
    command += ["--rest-port", "0", "--grpc-port", "0", "--admin-port", "0", *arguments]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "t")}
    (tmp_path / "t").mkdir()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path)
    try:
        assert process.stdout is not None
        assert "is ready" in process.stdout.readline()
        yield process, psutil.Process(process.pid).children(recursive=True)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=PATIENCE_SECONDS)


@pytest.mark.parametrize("name", ["link", "other/../run"])
async def test_plan_is_watched_in_any_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    async with Supervisor(Setup(write_echo_pipeline(tmp_path), tmp_path / name, proxy=False)) as supervisor:
        write_plan(supervisor.plan_file, echo_plan())
        await until(lambda: supervisor.plan is not None, "the plan is applied")
        write_plan(supervisor.plan_file, echo_plan("slow", generation=2))
        await until(lambda: supervisor.plan == echo_plan("slow", generation=2), "the next plan is applied")


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_SECONDS)
    assert alive == []


def test_kill_leaves_only_the_record(tmp_path: Path) -> None:
    """`kill -9` also ends the child processes; the report shows the run until then."""
    record = tmp_path / "record"
    with up(tmp_path, "--folder", str(record)) as (process, below):
        samples = record / "samples.jsonl"
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not samples.exists() or samples.read_text().count("\n") < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
        process.wait(timeout=PATIENCE_SECONDS)
    assert_gone(below)
    page = tmp_path / "killed.html"
    assert run(["report", str(record), "-o", str(page)]) == 0
    assert "<title>sample · Trimtab</title>" in page.read_text()


def test_folder_is_locked_by_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record"
    with up(tmp_path, "--folder", str(record)) as (process, below):
        arguments = ["up", str(tmp_path), "--plan", str(tmp_path / "given.json"), "--folder", str(record)]
        listed = (record / "endpoints.json").read_text()
        assert run([*arguments, "--rest-port", "0", "--grpc-port", "0", "--admin-port", "0"]) == 2
        assert f"is used by another run: process {process.pid}" in capsys.readouterr().err
        assert (record / "endpoints.json").read_text() == listed
        assert all(child.is_running() for child in below)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert (record / "sample.html").exists()
    assert_gone(below)


def test_interrupted_profile_ends_all_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trimtab", "profile", str(write_echo_pipeline(tmp_path)), "--quick"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (below := psutil.Process(process.pid).children(recursive=True)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.terminate()
        _, said = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 143
    assert said.endswith("trimtab: terminated\n")
    assert_gone(below)


def test_local_run_serves_and_records_a_load(tmp_path: Path) -> None:
    out = tmp_path / "record"
    options = ("--load", "constant:20", "--duration", "3", "--folder", str(out), "--report", str(tmp_path / "r.html"))
    with up(tmp_path, *options) as (process, below):
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, output
    assert_gone(below)
    summary = json.loads((out / "load" / "load.json").read_text())["summary"]
    assert summary["failed"] == 0
    assert summary["received"] == summary["ok"] + summary["late"] + summary["dropped"] + summary["refused"] > 20
    assert "<title>sample · Trimtab</title>" in (tmp_path / "r.html").read_text()


LOAD = ("--load", "constant:5", "--duration", "60")


@pytest.mark.parametrize(
    ("options", "number", "code"), [(LOAD, signal.SIGINT, 130), (LOAD, signal.SIGTERM, 143), ((), signal.SIGINT, 0)]
)
def test_interrupted_up_ends_all_processes(
    tmp_path: Path, options: tuple[str, ...], number: signal.Signals, code: int
) -> None:
    with up(tmp_path, *options) as (process, below):
        assert len(below) >= 4
        process.send_signal(number)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == code, output
    assert code or "requests received" in output
    assert_gone(below)
    assert list((tmp_path / "t").iterdir()) == []


WAITS = """
import asyncio, sys
from trimtab.app import run_reporting_errors

async def waits():
    try:
        print("waits", flush=True)
        await asyncio.Event().wait()
    finally:
        print("cleaned up", flush=True)

sys.exit(run_reporting_errors(lambda: asyncio.run(waits())))
"""


FAILS = """
import sys, time
from trimtab.app import run_reporting_errors

def waits():
    try:
        print("waits", flush=True)
        time.sleep(60)
    finally:
        raise OSError("a pipe is broken")

sys.exit(run_reporting_errors(waits))
"""


@pytest.mark.parametrize(
    ("script", "shell", "said"),
    [
        (FAILS, (), ("", "trimtab: terminated\n")),
        # Shells ignore SIGINT for a background job.
        (WAITS, ("sh", "-c", 'trap "" INT; exec "$@"', "sh"), ("cleaned up\n", "trimtab: terminated\n")),
    ],
    ids=["failure caused by the signal", "background job"],
)
def test_sigterm_exits_with_143(script: str, shell: tuple[str, ...], said: tuple[str, str]) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([*shell, sys.executable, "-c", script], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.terminate()
        output = process.communicate(timeout=PATIENCE_SECONDS)

    assert (process.returncode, output) == (143, said)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("verb", ["demo", "compare"])
def test_compare_exits_with_the_signal_code(tmp_path: Path, verb: str, number: signal.Signals, code: int) -> None:
    write_trusted_profile(tmp_path)
    command = [sys.executable, "-m", "trimtab", verb, str(write_echo_pipeline(tmp_path)), *LOAD, "-o", str(tmp_path)]
    command += ["--page-port", "0"] if verb == "demo" else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = []
        while "is ready" not in (line := process.stdout.readline()):
            said.append(line)
            assert line, "".join(said)
        process.send_signal(number)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == code, output


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_loadtest_reports_and_exits_with_the_signal_code(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    fake = FakePipeline()
    (tmp_path / "pipeline.yaml").write_text(dump_yaml(a_pipeline()))
    async with rest_server(fake) as address:
        arguments = ["-m", "trimtab", "loadtest", str(tmp_path), *LOAD, "--address", address.removeprefix("http://")]
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=subprocess.PIPE)
        await fake.arrived.wait()
        process.send_signal(number)
        output, _ = await process.communicate()

    assert process.returncode == code
    assert json.loads(output.splitlines()[-1])["figures"]["received"] == fake.seen.total()


def write_trusted_profile(folder: Path) -> None:
    """Write profiles of this machine next to the echo pipeline, so that none is measured."""
    profiles = [each.with_spec(hardware=this_machine()) for each in echo_profiles().values()]
    (folder / "profile.yaml").write_text(dump_yaml(*profiles))


INPUTS = (IMAGE, TASK_INPUT)
VARIANT = {"storageUri": "small.safetensors", "resources": {"cpu": "500m", "memory": "64Mi"}}


def body(task: int | None = None, name: str = "") -> dict[str, Any]:
    image = np.zeros(SHAPE.side**2, np.uint8).tolist()
    inputs = [{"name": "image", "datatype": "UINT8", "shape": [1, 1, SHAPE.side, SHAPE.side], "data": image}]
    if task is not None:
        inputs.append({"name": "task", "datatype": "INT64", "shape": [1], "data": [task]})
    return {"inputs": inputs, "parameters": {"trimtab.task": name} if name else {}}


async def test_registered_task_outlives_all_replicas(weights, tmp_path):
    (tmp_path / "small.safetensors").symlink_to(weights)
    (tmp_path / "pipeline.yaml").write_text(dump_yaml(a_transformer_pipeline(INPUTS, "20s", **VARIANT)))
    key = new_key()
    (tmp_path / "keys").write_text(f"ann: {format_entry(HashedKey('ann', key_digest(key)))}\n")
    plan = a_plan(load_pipeline(tmp_path), replicas=2, cores=0.5)
    setup = Setup(tmp_path / "pipeline.yaml", tmp_path / "run", plan=plan, proxy=False, admin_keys=tmp_path / "keys")
    task = a_task(tmp_path / "task.safetensors", weights, likeliest=1, ways={"plain": None})
    async with Supervisor(setup) as local, httpx.AsyncClient(timeout=60, trust_env=False) as client:
        await local.ready()

        async def ask(task: int | None = None, name: str = "") -> httpx.Response:
            url = f"http://127.0.0.1:{local.rest_port}/v2/models/sample/infer"
            return await client.post(url, json=body(task, name))

        async def label(task: int | None = None, name: str = "") -> int:
            answer = await ask(task, name)
            assert answer.status_code == 200, answer.text
            assert answer.json()["parameters"].get("trimtab.classify.task", "") == name
            return int(answer.json()["outputs"][0]["data"][0])

        url = f"http://127.0.0.1:{local.admin_port}/trimtab/v1/tasks/classify/vit/late"
        assert (await client.put(url, content=task.read_bytes())).status_code == 401
        assert await label(2) == -1
        registered = await client.put(url, content=task.read_bytes(), headers={"Authorization": f"Bearer {key}"})
        assert registered.status_code == 201, registered.text
        assert (registered.json()["number"], registered.json()["replicas"]) == (2, 2)
        assert [await label(2) for _ in range(8)] == [1] * 8
        assert [await label(name="late") for _ in range(8)] == [1] * 8
        refused = await ask(0, "late")
        assert (refused.status_code, "index 2" in refused.text) == (400, True)

        before = set(local.replica_manager.pids.values())
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        await until(
            lambda: len(set(local.replica_manager.pids.values()) - before) == 2, "both replicas were replaced", None
        )

        assert [await label(2) for _ in range(8)] == [1] * 8
        assert [await label(name="late") for _ in range(8)] == [1] * 8
