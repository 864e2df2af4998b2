"""Processes of a benchmark: they end with it, on exit and on signals."""

import signal
import subprocess
import sys

import psutil
import pytest

from benchmarks.router.processes import ROOT

PATIENT_SECONDS = 120.0
GONE_WITHIN_SECONDS = 2.0
SCRIPT = """
import psutil, sys
from benchmarks.overload.driver import neighbours

with neighbours(1):
    (busy,) = psutil.Process().children()
    while busy.cpu_times().user < 0.2:  # it is under way
        pass
    print(busy.pid, flush=True)
    sys.stdin.read()
"""


def started(*arguments):
    pipe = subprocess.PIPE
    command = [sys.executable, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def still_there(processes):
    """Processes that have not ended in time; a zombie has ended."""
    _, left = psutil.wait_procs(processes, GONE_WITHIN_SECONDS)
    return [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL])
def test_neighbours_end_with_their_parent(ended_by):
    with started("-c", SCRIPT) as script:
        neighbour = psutil.Process(int(script.stdout.readline()))
        script.send_signal(ended_by)
        script.wait(PATIENT_SECONDS)
        left = still_there([neighbour])
    for process in left:
        process.kill()

    assert not left


def test_terminated_overload_leaves_no_process():
    with started("-m", "benchmarks", "overload", "--phase", "proxy") as command:
        command.stdout.readline()  # the table's head: it has begun
        below = psutil.Process(command.pid).children(recursive=True)
        command.terminate()
        _, errors = command.communicate(timeout=PATIENT_SECONDS)
        left = still_there(below)

    assert (command.returncode, left) == (143, [])
    assert errors.endswith("trimtab: terminated\n")
    assert "Traceback" not in errors
