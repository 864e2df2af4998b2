"""CPU sets of benchmark processes: only processors of this process's affinity."""

import json
import subprocess
import sys

import pytest

from benchmarks.harness.processors import CORES, first_two
from benchmarks.router.processes import ROOT

SCRIPT = """
import json, os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
from benchmarks.harness.processors import CLIENT_CORE, SERVER_CORE, pin, pin_threads
from benchmarks.overload.driver import keep_off_servers
from benchmarks.overload.driver import watch_cpu

found = []
for act in (lambda: pin(SERVER_CORE), lambda: pin(CLIENT_CORE), lambda: keep_off_servers(os.getpid())):
    act()
    found.append(sorted(os.sched_getaffinity(0)))
with watch_cpu(os.getpid(), {}):
    pass
print(json.dumps(found))
"""


@pytest.mark.parametrize(("cores", "pair"), [({2, 3}, (2, 3)), ({9, 4, 7}, (4, 7)), ({5}, (5, 5)), ({0, 1}, (0, 1))])
def test_first_two_allowed_cores_are_taken(cores, pair):
    assert first_two(cores) == pair


@pytest.mark.parametrize("core", [min(CORES), max(CORES)])
def test_process_with_one_core_is_pinned_to_it(core):
    command = [sys.executable, "-c", SCRIPT, str(core)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert json.loads(done.stdout or "[]") == [[core]] * 3, done.stderr
