"""Upkeep of processes: hung ones are killed, and their logs are bounded."""

import os
import signal
import sys
from pathlib import Path

import pytest

from trimtab.local.process_upkeep import trim_logs, wait_for_exit
from trimtab.local.replica_manager import BUSY_HANG_SECONDS, IDLE_HANG_SECONDS, HangDetector
from trimtab_pipelines.processes.child_process import ChildProcess

HEARTBEATS = "import sys, time\nfor _ in range({times}):\n    print(flush=True)\n    time.sleep(0.05)\nsys.exit(7)\n"


async def a_process(folder: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> ChildProcess:
    """Start a process that sends `times` heartbeats, twenty a second, and ends with 7."""
    (folder / "beating.py").write_text(HEARTBEATS.format(times=times))
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


def test_large_log_keeps_its_newer_half(tmp_path: Path) -> None:
    path = tmp_path / "router.log"
    with path.open("ab", buffering=0) as writer:
        for number in range(1000):
            writer.write(b"line %d\n" % number)
        trim_logs(tmp_path, max_bytes=1000)
        writer.write(b"next\n")
    lines = path.read_text().splitlines()
    assert lines[-2:] == ["line 999", "next"]
    assert set(lines) <= {*(f"line {number}" for number in range(1000)), "next"}
    assert 400 < path.stat().st_size <= 600


def test_oldest_logs_are_removed(tmp_path: Path) -> None:
    for number in range(5):
        path = tmp_path / f"first-{number}.log"
        path.write_text("said")
        os.utime(path, (number, number))
    trim_logs(tmp_path, max_files=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first-3.log", "first-4.log"]


def test_idle_replica_hangs_soon() -> None:
    detector = HangDetector.update(None, 0.0, computes=False)
    assert not detector.hangs(0.1)
    detector = HangDetector.update(detector, IDLE_HANG_SECONDS, computes=False)
    assert detector.hangs(IDLE_HANG_SECONDS)


def test_busy_replica_hangs_after_a_longer_time() -> None:
    detector = HangDetector.update(None, 0.0, computes=True)
    for tenth in range(1, int(10 * BUSY_HANG_SECONDS)):
        detector = HangDetector.update(detector, tenth / 10, computes=True)
        assert not detector.hangs(tenth / 10)
    assert HangDetector.update(detector, BUSY_HANG_SECONDS, computes=True).hangs(BUSY_HANG_SECONDS)
