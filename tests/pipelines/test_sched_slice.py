"""Scheduler slice of a process: set, inherited by children, and independent of niceness."""

import multiprocessing
import os
import platform
import threading
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.time_slices import turn_seconds
from trimtab_pipelines.processes.sched_slice import MAX_SLICE_SECONDS, set_time_slice


def elsewhere(seconds: float, niceness: int) -> tuple[bool, int, list[int]]:
    """Ask in a process of its own; return how nice it is then, and the turns of it and of a thread in nanoseconds."""
    os.nice(niceness)
    asked = set_time_slice(seconds)
    seen = [turn_seconds(0)]
    thread = threading.Thread(target=lambda: seen.append(turn_seconds(0)))
    thread.start()
    thread.join()
    return asked, os.getpriority(os.PRIO_PROCESS, 0), [round(1e9 * one) for one in seen]


@pytest.mark.parametrize(("seconds", "niceness"), [(0.0003, 0), (MAX_SLICE_SECONDS, 5)])
def test_time_slice_applies_to_process_and_threads(seconds: float, niceness: int) -> None:
    turn_seconds(0)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        asked, nice, slices = pool.submit(elsewhere, seconds, niceness).result()

    assert asked
    assert nice == niceness + os.getpriority(os.PRIO_PROCESS, 0)
    assert slices == [round(1e9 * seconds)] * 2


def test_unknown_machine_is_left_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "pdp11")
    assert not set_time_slice(MAX_SLICE_SECONDS)


def test_other_scheduling_class_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_IDLE)
    assert not set_time_slice(MAX_SLICE_SECONDS)
