"""A pipeline of real processes: it serves, follows plans, survives kills, and leaves nothing behind."""

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
from typing import Any

import httpx
import psutil
import pytest

from tests.cli.pipelines import echo_plan, write_echo_pipeline, write_plan
from trimtab.local.processes import StartError
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_pipelines.documents import DocumentError

BODY = {
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}],
    "parameters": {"timeout": 60_000_000},
}
PATIENCE_SECONDS = 120.0


async def until(holds: Callable[[], bool], what: str, beside: "asyncio.Task[None] | None" = None) -> None:
    """Wait until a condition holds that nobody announces, or what runs beside fails."""
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
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{local.rest_port}", timeout=90, trust_env=False) as running:
        yield running


async def test_follows_plans_and_survives_kills(local: Supervisor, client: httpx.AsyncClient) -> None:
    """Under requests all the time: a change of variant, of replicas, a killed replica, a broken plan. None fails."""
    answered, stop = [], asyncio.Event()

    async def keep_asking() -> None:
        while not stop.is_set():
            answered.append((await infer(client))["parameters"]["trimtab.first.variant"])

    asking = asyncio.create_task(keep_asking())
    await until(lambda: len(answered) > 3, "requests are answered", asking)
    starts = local.fleet.starts
    write_plan(local.plan_file, echo_plan("slow", generation=2))
    await until(lambda: answered[-1] == "slow", "the router uses the other variant", asking)
    assert local.fleet.starts == starts, "both variants are loaded: nothing had to start"

    write_plan(local.plan_file, echo_plan("slow", replicas=2, generation=3))
    await until(lambda: local.fleet.settled and len(local.fleet.pids) == 4, "there are two replicas a stage")
    write_plan(local.plan_file, echo_plan("slow", replicas=1, generation=4))
    await until(lambda: local.fleet.settled and len(local.fleet.pids) == 2, "there is one replica a stage again")

    local.plan_file.write_text("{")
    victims = dict(local.fleet.pids)
    for pid in victims.values():
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not victims.keys() & local.fleet.pids.keys(), "the deaths are seen")
    await until(lambda: local.fleet.settled, "others have taken their place")
    seen = len(answered)
    await until(lambda: len(answered) > seen + 3, "they serve", asking)
    stop.set()
    await asking
    assert local.fleet.site.limit_cores == 2
    assert sorted(fault.what for fault in local.faults) == sorted(f"replica {name} ended" for name in victims)
    counters = await local.client.counters()
    assert counters.outcomes["failed"] == 0
    assert counters.received == sum(counters.outcomes.values()) == len(answered)


async def test_restarts_the_router_on_the_same_port(local: Supervisor, client: httpx.AsyncClient) -> None:
    """What sends to the router finds it again where it was."""
    assert local.router is not None
    os.kill(local.router.pid, signal.SIGKILL)
    await until(lambda: bool(local.faults), "the death is seen")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        with suppress(httpx.HTTPError, AssertionError):
            await infer(client)
            break
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_says_why_the_router_does_not_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        setup = Setup(
            write_echo_pipeline(tmp_path), tmp_path / "run", plan=echo_plan(), rest_port=taken.getsockname()[1]
        )
        with pytest.raises(StartError, match=r"door[\s\S]*Address already in use"):
            async with Supervisor(setup):
                pass
    assert not (tmp_path / "run" / "models").exists()


async def test_says_why_a_replica_does_not_start(tmp_path: Path) -> None:
    """What the model server said is part of the message."""
    document = write_echo_pipeline(tmp_path).read_text().replace("family: echo", "family: ecco")
    (tmp_path / "pipeline.yaml").write_text(document)
    with pytest.raises(StartError, match=r"stage (first|second): its replica does not start; it said:[\s\S]*ecco"):
        async with Supervisor(Setup(tmp_path, tmp_path / "run", plan=echo_plan())) as running:
            await running.ready()


def test_refuses_a_plan_beyond_the_budget(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match="asks for 3 cores of a budget of 2"):
        Supervisor(Setup(write_echo_pipeline(tmp_path), tmp_path / "run", plan=echo_plan(replicas=3)))


@contextmanager
def up(tmp_path: Path, *arguments: str) -> Iterator[tuple["subprocess.Popen[str]", list[psutil.Process]]]:
    """Run `trimtab up` until it says that it serves; yield it and all processes below it."""
    pipeline = write_echo_pipeline(tmp_path)
    plan = write_plan(tmp_path / "given.json", echo_plan())
    command = [sys.executable, "-m", "trimtab", "up", str(pipeline), "--plan", str(plan), "--rest-port", "0"]
    command += ["--grpc-port", "0", *arguments]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        assert "is ready" in process.stdout.readline()
        yield process, psutil.Process(process.pid).children(recursive=True)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=PATIENCE_SECONDS)


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_SECONDS)
    assert alive == []


def test_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    """Ctrl-C ends the command with 0, its processes, and its temporary files."""
    with up(tmp_path) as (process, below):
        assert len(below) >= 4
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, output
    assert "requests received" in output
    assert_gone(below)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_kill_leaves_no_process_behind(tmp_path: Path) -> None:
    """Even kill -9 of the command takes everything below with it."""
    with up(tmp_path) as (process, below):
        process.kill()
        process.wait(timeout=PATIENCE_SECONDS)
    assert_gone(below)


def test_serves_a_load_and_records_it(tmp_path: Path) -> None:
    """The load's end is the command's end; the record and the report are there."""
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
