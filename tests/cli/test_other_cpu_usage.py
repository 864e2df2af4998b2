"""CPU usage of other processes, and its use by the adapter."""

import subprocess
import sys
import time

from trimtab.local.other_cpu_usage import SAMPLE_INTERVAL_SECONDS, WINDOW_SECONDS, OtherCpuUsage, busy_seconds
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
