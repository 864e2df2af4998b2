"""Local runtime: upkeep of processes and logs, and the choice of a profile of this machine and these versions."""

import asyncio
import os
import signal
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.cli.pipelines import echo_pipeline, echo_profiles, write_echo_pipeline
from trimtab.local import profile_cache
from trimtab.local.process_upkeep import trim_logs, wait_for_exit
from trimtab.local.profile_cache import find_profile
from trimtab.local.replica_manager import BUSY_HANG_SECONDS, IDLE_HANG_SECONDS, HangDetector
from trimtab_pipelines.documents import dump_yaml, load_pipeline
from trimtab_pipelines.processes.child_process import ChildProcess
from trimtab_pipelines.profile import ModelProfile
from trimtab_profiler.identity import model_identity, this_machine

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


@pytest.mark.parametrize("package", ["trimtab", "torch"])
def test_cached_profile_of_another_version_is_not_used(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(profile_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    path = write_echo_pipeline(tmp_path)
    pipeline = load_pipeline(path)

    async def at_once(*_: object) -> dict[str, ModelProfile]:
        here = {"hardware": this_machine()}
        found = echo_profiles().items()
        return {name: one.with_spec(**here) for name, one in found}

    monkeypatch.setattr(profile_cache, "profile", at_once)
    assert find_profile(path, pipeline, None) is None
    chosen = asyncio.run(profile_cache.measure_profile(path, pipeline, lambda *_: None))
    assert find_profile(path, pipeline, None) == profile_cache.ProfileChoice(chosen.path, "measured here earlier")

    named = "trimtab.local.profile_cache.version_of"
    monkeypatch.setattr(named, lambda name: version(name) + ("+1" if name == package else ""))
    assert find_profile(path, pipeline, None) is None


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("name: sample", "name: other", "it is of pipeline sample"),
        ("random://?seed=1", "random://?seed=7", "variant fast of stage first was measured with other weights"),
        ("delay_seconds: 0.0", "delay_seconds: 1.0", "with other parameters (delay_seconds)"),
        ("family: echo", "family: ecco", "was measured with family echo, which is ecco now"),
    ],
)
def test_profile_of_another_model_is_not_used(tmp_path: Path, before: str, after: str, reason: str) -> None:
    path = write_echo_pipeline(tmp_path)
    pipeline, profiles = load_pipeline(path), []
    for name, profile in echo_profiles().items():
        models = {one.name: model_identity(one, tmp_path) for one in pipeline.spec.stage(name).variants}
        profiles.append(profile.with_spec(models=models, hardware=this_machine()))
    (tmp_path / "profile.yaml").write_text(dump_yaml(*profiles))
    assert find_profile(path, pipeline, None) is not None

    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    messages: list[str] = []
    assert find_profile(path, load_pipeline(path), None, messages.append) is None
    assert reason in messages[0]
    assert find_profile(path, load_pipeline(path), tmp_path / "profile.yaml", messages.append) is not None
    assert messages[1].startswith("! profile")
    assert reason in messages[1]


def test_model_identity_depends_on_weights(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"one")
    (variant, *_) = echo_pipeline().spec.stages[0].variants
    variant = variant.replace(storage_uri="w.safetensors")
    before = model_identity(variant, tmp_path)
    path.write_bytes(b"two")
    assert before.describe_change(model_identity(variant, tmp_path)) == "other weights"
    path.write_bytes(b"one")
    assert not before.describe_change(model_identity(variant, tmp_path))
