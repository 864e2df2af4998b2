"""CPU usage of other processes, and its use by the adapter."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.builders import a_point_profile, a_profile
from tests.cli.pipelines import echo_pipeline, echo_plan, write_echo_pipeline
from tests.cli.test_supervisor import until
from tests.time_slices import turn_seconds
from trimtab.local.other_cpu_usage import SAMPLE_INTERVAL_SECONDS, WINDOW_SECONDS, OtherCpuUsage, busy_seconds
from trimtab.local.supervisor import ADAPTER_NICENESS, Setup, Supervisor
from trimtab_adapter.load_sources import read_machine_load
from trimtab_pipelines.documents import dump_yaml, load_machine
from trimtab_pipelines.processes.sched_slice import MAX_SLICE_SECONDS
from trimtab_pipelines.shared_capacity import Machine

BURNS = "while True: pass"


def test_cpu_usage_of_replicas_is_excluded():
    others = OtherCpuUsage()
    assert others.sample(100.0, (50.0, 4), {"a": 10.0}) is None

    assert others.sample(102.0, (53.0, 4), {"a": 11.0, "b": 0.5}) == Machine(cores=4, other_cores=0.75)
    gone = others.sample(104.0, (56.0, 4), {"b": 1.5})  # of a, which ended, no second becomes others'
    assert gone == Machine(cores=4, other_cores=round((6.0 - 2.5) / 4, 2))


def test_cpu_usage_of_ended_replicas_is_excluded():
    others = OtherCpuUsage()
    others.sample(0.0, (50.0, 4), {"a": 40.0})
    ending = others.sample(2.0, (51.0, 4), {"a": 0.0})  # the CPU time of an ended replica is unknown
    assert ending == Machine(cores=4, other_cores=0.5)
    assert others.sample(4.0, (52.0, 4), {}) == Machine(cores=4, other_cores=0.5)


def test_cpu_usage_is_of_the_window_and_not_negative():
    others = OtherCpuUsage()
    others.sample(0.0, (0.0, 2), {})
    for second in range(2, int(WINDOW_SECONDS) + 4, 2):
        last = others.sample(float(second), (2.0, 2), {})
    assert last == Machine(cores=2, other_cores=0.0)
    assert others.sample(WINDOW_SECONDS + 4, (2.0, 2), {"a": 9.0}) == Machine(cores=2, other_cores=0.0)
    assert others.sample(WINDOW_SECONDS + 4.5, (99.0, 2), {"a": 9.0}) == Machine(cores=2, other_cores=2.0)


def test_sample_is_due_after_the_interval():
    others = OtherCpuUsage()
    assert others.is_due(0.0)
    others.sample(0.0, (0.0, 2), {})
    assert not others.is_due(SAMPLE_INTERVAL_SECONDS / 2)
    assert others.is_due(SAMPLE_INTERVAL_SECONDS)


def test_busy_process_counts_as_other_usage():
    burner = subprocess.Popen([sys.executable, "-c", BURNS])
    try:
        others, began = OtherCpuUsage(), time.monotonic()
        others.sample(began, busy_seconds(), {})
        time.sleep(SAMPLE_INTERVAL_SECONDS)  # processor time passes, which nothing announces
        seen = others.sample(time.monotonic(), busy_seconds(), {})
    finally:
        burner.kill()
        burner.wait()

    assert seen is not None
    assert 0.5 < seen.other_cores <= seen.cores


async def test_adapter_reads_other_cpu_usage(tmp_path: Path):
    pipeline = write_echo_pipeline(tmp_path)
    profiles = tmp_path / "profile.yaml"
    points = [a_point_profile(name, cores=0.5) for name in ("fast", "slow")]
    profiles.write_text(dump_yaml(*(a_profile(stage.name, points) for stage in echo_pipeline().spec.stages)))
    setup = Setup(pipeline, tmp_path / "run", profiles_file=profiles, plan=echo_plan())
    async with Supervisor(setup) as local:
        await local.ready()
        assert local.adapter is not None
        await until(local.machine_file.exists, "the machine file exists")
        assert local.adapter.running
        assert psutil.Process(local.adapter.pid).nice() == psutil.Process().nice() + ADAPTER_NICENESS
        assert turn_seconds(local.adapter.pid) == pytest.approx(MAX_SLICE_SECONDS)

    seen = load_machine(local.machine_file)
    assert seen == read_machine_load(local.machine_file)
    assert 0 <= seen.other_cores <= seen.cores


def test_invalid_machine_file_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    broken = tmp_path / "machine.json"
    assert read_machine_load(None) is None
    assert read_machine_load(broken) is None
    broken.write_text('{"cores": 0, "othersCores": 1}')
    assert read_machine_load(broken) is None
    assert "cores" in caplog.text
