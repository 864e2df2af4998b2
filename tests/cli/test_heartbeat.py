"""Who gives no sign of life is ended; who speaks, or ends by itself, is left alone."""

import os
import signal
import sys
from pathlib import Path

import pytest

from trimtab.local.heartbeat import wait_for_exit
from trimtab_pipelines.processes.child_process import ChildProcess

BEATS = "import sys, time\nfor _ in range({times}):\n    print(flush=True)\n    time.sleep(0.05)\nsys.exit(7)\n"


async def a_process(folder: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> ChildProcess:
    """Start one that speaks so many times, twenty times a second, and ends with 7."""
    (folder / "beating.py").write_text(BEATS.format(times=times))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    return await ChildProcess.start("beating", [], folder / "log", "what beats")


async def test_process_with_heartbeats_runs_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = await a_process(tmp_path, monkeypatch, 10)
    hung: list[str] = []
    assert await wait_for_exit(module, 60.0, lambda: hung.append("hung")) == 7
    assert hung == []


async def test_stopped_process_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = await a_process(tmp_path, monkeypatch, 10**6)
    assert await module.read_line() == b"\n"
    os.kill(module.pid, signal.SIGSTOP)
    hung: list[str] = []
    assert await wait_for_exit(module, 0.5, lambda: hung.append("hung")) == -signal.SIGKILL
    assert hung == ["hung"]
