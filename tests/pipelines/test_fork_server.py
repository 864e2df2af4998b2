"""Forked processes: exit status, parent death, replacement of the fork server, edited modules, and fresh state."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from trimtab_pipelines.processes.child_process import ChildProcess
from trimtab_pipelines.processes.forked_process import fork_server, start_forked, stop_fork_server
from trimtab_pipelines.processes.priority import NICENESS

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux adopts orphans")

REPORT = """
import json, os, random, sys, threading
import numpy
try:
    session = open("/proc/self/autogroup").read().split()[-1]
except OSError:
    session = "5"  # a kernel without autogroup
print(json.dumps({
    "arguments": sys.argv[1:], "folder": os.getcwd(), "variable": os.environ.get("VARIABLE"), "parent": os.getppid(),
    "name": __name__, "niceness": os.nice(0), "session": session,
    "random": [random.random(), numpy.random.random()], "threads": threading.active_count(),
}), flush=True)
sys.stderr.write("in the log")
"""
WAITING = "import time\nprint('waiting', flush=True)\ntime.sleep(600)"
PARENT = """
import asyncio, sys, time
from pathlib import Path
from trimtab_pipelines.processes.forked_process import fork_server, start_forked

async def main():
    process = await start_forked("waiting", [], Path("log"), "it", environment={"PYTHONPATH": sys.argv[1]})
    await process.read_line()
    print(process.pid, fork_server().pid, flush=True)
    time.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "report.py").write_text(REPORT)
    (folder / "waiting.py").write_text(WAITING)
    (folder / "ending.py").write_text(
        "import sys\nsys.exit(int(sys.argv[1]) if sys.argv[1].isdigit() else sys.argv[1])"
    )
    (folder / "failing.py").write_text("raise ValueError('it fails')")
    return folder


@pytest.fixture(autouse=True)
def no_server_is_left() -> Iterator[None]:
    yield
    stop_fork_server()


async def forked(folder: Path, module: str, *arguments: str, **environment: str) -> ChildProcess:
    return await start_forked(
        module,
        arguments,
        folder.parent / "log",
        "it",
        imports=["numpy"],
        environment={"PYTHONPATH": str(folder), **environment},
    )


async def report(folder: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    process = await forked(folder, "report", *arguments, **environment)
    content: dict[str, Any] = json.loads(await process.read_line())
    assert await process.wait() == 0
    return content


async def test_module_runs_as_main_in_a_child_of_the_sender(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(modules.parent)
    content = await report(modules, "--one", "2", VARIABLE="set")

    assert (content["name"], content["arguments"], content["variable"]) == ("__main__", ["--one", "2"], "set")
    assert (content["parent"], content["folder"], content["threads"]) == (os.getpid(), str(modules.parent), 1)
    assert (modules.parent / "log").read_text() == "in the log"


@pytest.mark.parametrize(
    ("module", "argument", "code", "log"),
    [("ending", "0", 0, ""), ("ending", "3", 3, ""), ("ending", "no", 1, "no\n"), ("failing", "", 1, "it fails\n")],
)
async def test_exit_code_is_reported(modules: Path, module: str, argument: str, code: int, log: str) -> None:
    process = await forked(modules, module, argument)

    assert await process.wait() == code
    assert (modules.parent / "log").read_text().endswith(log)


async def test_signal_that_ended_a_process_is_reported(modules: Path) -> None:
    process = await forked(modules, "waiting")
    assert await process.read_line() == b"waiting\n"
    os.kill(process.pid, signal.SIGKILL)

    assert await process.wait() == -signal.SIGKILL
    assert not psutil.pid_exists(process.pid)


async def test_processes_have_random_numbers_of_their_own(modules: Path) -> None:
    first, second = (await report(modules))["random"], (await report(modules))["random"]

    assert not set(first) & set(second)


async def test_processes_have_a_lower_priority(modules: Path) -> None:
    content = await report(modules)

    assert (content["niceness"], content["session"]) == (os.nice(0) + NICENESS, str(NICENESS))


async def test_edited_module_is_read_by_the_next_process(modules: Path) -> None:
    (modules / "family.py").write_text("VERSION = 'one'")
    (modules / "shown.py").write_text("import family\nprint(family.VERSION)")
    versions = []
    for version in ("one", "another"):
        (modules / "family.py").write_text(f"VERSION = {version!r}")
        process = await forked(modules, "shown")
        versions.append((await process.read_line()).decode().strip())
        await process.wait()

    assert versions == ["one", "another"]


async def test_variables_are_those_of_the_sender_and_of_imports(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (modules / "library.py").write_text("import os; os.environ['VARIABLE'] = 'of an import'")
    (modules / "shown.py").write_text("import os; print(os.environ.get('VARIABLE'), os.environ.get('EARLIER'))")
    monkeypatch.setenv("PYTHONPATH", str(modules))
    monkeypatch.setenv("EARLIER", "of the server's start")
    fork_server()
    monkeypatch.delenv("EARLIER")
    process = await start_forked("shown", [], modules.parent / "log", "it", imports=["library"])

    assert await process.read_line() == b"of an import None\n"
    assert await process.wait() == 0


async def test_fork_server_has_one_thread(modules: Path) -> None:
    await report(modules)

    assert psutil.Process(fork_server().pid).num_threads() == 1


async def test_dead_fork_server_is_replaced_and_processes_live_on(modules: Path) -> None:
    running = await forked(modules, "waiting")
    await running.read_line()
    dead = fork_server().pid
    os.kill(dead, signal.SIGKILL)
    content = await report(modules)

    assert content["parent"] == os.getpid()
    assert fork_server().pid != dead
    assert running.running
    await running.stop(60)


async def test_stopping_ends_a_process(modules: Path) -> None:
    process = await forked(modules, "waiting")
    await process.read_line()
    await process.stop(60)

    assert process.exit_code == -signal.SIGTERM


def test_processes_and_fork_server_end_with_killed_sender(modules: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(modules)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=modules.parent) as parent:
        assert parent.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        parent.send_signal(signal.SIGKILL)

    assert len(processes) == 2
    assert not psutil.wait_procs(processes, 60)[1]
