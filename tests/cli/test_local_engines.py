"""Third-party servers on one machine: started by the supervisor, or used at their addresses."""

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.builders import a_plan
from tests.cli.test_supervisor import until
from tests.router.chats import a_chat, a_chat_pipeline, a_writer
from tests.router.engines import MODEL, Engine, a_served
from trimtab.local.supervisor import Setup, Supervisor
from trimtab_pipelines.documents import dump_yaml
from trimtab_pipelines.processes.child_process import StartError
from trimtab_pipelines.processes.priority import NICENESS
from trimtab_profiler.measure import Effort
from trimtab_profiler.profile import ProfileOptions, profile

ROOT = Path(__file__).parents[2]
SERVED: dict[str, Any] = {"image": "", "engine": "vllm", "modelName": MODEL}
COMMAND: dict[str, Any] = {
    "command": [sys.executable, "-m", "tests.router.engine_process"],
    "args": ["$(PORT)"],
    "env": {"PYTHONPATH": str(ROOT)},
}


def a_setup(folder: Path, replicas: int = 1, **container: Any) -> Setup:
    pipeline = a_chat_pipeline([a_writer(variants=[a_served(**SERVED, **container)])], slo={"latency": "20s"})
    (folder / "pipeline.yaml").write_text(dump_yaml(pipeline))
    return Setup(folder, folder / "run", plan=a_plan(pipeline, replicas=replicas, cores=1.0), proxy=False)


async def chat(local: Supervisor) -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        url = f"http://127.0.0.1:{local.rest_port}/v1/chat/completions"
        answer = await client.post(url, json=a_chat("one two"))
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])


async def test_command_is_started_replaced_and_ended(tmp_path: Path) -> None:
    async with Supervisor(a_setup(tmp_path, **COMMAND)) as local:
        await local.ready()
        assert await chat(local) == "one two"
        (pid,) = local.replica_manager.pids.values()
        assert psutil.Process(pid).nice() == os.nice(0) + NICENESS
        os.kill(pid, signal.SIGKILL)
        await until(lambda: pid not in local.replica_manager.pids.values(), "the engine has ended")
        await until(lambda: bool(local.replica_manager.pids), "another runs")
        assert await chat(local) == "one two"
        (pid,) = local.replica_manager.pids.values()
    assert not psutil.pid_exists(pid)


async def test_unknown_command_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"^command no-such-engine: No such file or directory$"):
        async with Supervisor(a_setup(tmp_path, command=["no-such-engine"])) as local:
            await local.ready()


async def test_endpoints_are_used_and_left_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESTS_API_KEY", "secret")
    engines = [Engine(kind="vllm", key="secret") for _ in range(2)]
    for engine in engines:
        await engine.start()
    urls = [f"http://127.0.0.1:{engine.port}" for engine in engines]
    async with Supervisor(a_setup(tmp_path, 2, endpoints=urls, apiKeyEnv="TESTS_API_KEY")) as local:
        await local.ready()
        await until(lambda: all(engine.probes for engine in engines), "both are probed")
        await engines[0].kill()
        for _ in range(3):
            assert await chat(local) == "one two"
        assert "secret" not in "".join(path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert len(engines[1].asked) >= 3
    await engines[1].stop()


async def test_engine_is_profiled_at_its_address(tmp_path: Path) -> None:
    engine = Engine(kind="vllm")
    await engine.start()
    setup = a_setup(tmp_path, endpoints=[f"http://127.0.0.1:{engine.port}"])
    pipeline = Supervisor(setup).pipeline
    options = ProfileOptions(effort=Effort(0.05, 2, 0.1, rounds=1), batch_sizes=(1, 4))
    profiles = await profile(pipeline, tmp_path, options)
    await engine.stop()

    (point,) = profiles["text"].spec.points
    assert [measured.batch_size for measured in point.measurements] == [1, 4]
    assert point.chats is not None
    assert point.chats.time_to_first_token.measurements
    salts = Counter(asked["cache_salt"] for asked in engine.asked)
    assert 4 in salts.values()  # a batch of four chats, which reuse no prefix of another batch
