"""Modules as processes of their own: read, isolated from where they are started, and gone with who started them."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trimtab_pipelines.processes.child_process import ChildProcess, StartError
from trimtab_pipelines.processes.ready_line import RouterPorts

ANNOUNCING = """
import sys, time
from trimtab_pipelines.processes.ready_line import RouterPorts, announce
announce(RouterPorts(7, 8))
sys.stderr.write("listening")
time.sleep(600)
"""
PARENT = """
import asyncio, sys, time
from pathlib import Path
from trimtab_pipelines.processes.child_process import Module
process = asyncio.run(Module.start("announcing", [], Path("log"), "it", environment={"PYTHONPATH": sys.argv[1]}))
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def modules(tmp_path: Path) -> dict[str, str]:
    """Modules to start: where they lie, as a variable of the environment."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "announcing.py").write_text(ANNOUNCING)
    (folder / "babbling.py").write_text("print('hello')")
    (folder / "broken.py").write_text("raise SystemExit('no such thing')")
    return {"PYTHONPATH": str(folder)}


async def test_it_says_where_it_listens_and_ends_when_told(tmp_path, modules):
    module = await ChildProcess.start("announcing", [], tmp_path / "logs" / "log", "the router", environment=modules)

    assert await module.read_ready_line(RouterPorts, 60) == RouterPorts(7, 8)
    assert module.running
    await module.stop(60)
    assert not module.running


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("babbling", r"the router said b'hello\\n'; expected its ports"),
        ("broken", r"the router stopped with exit code 1; it said:\nno such thing"),
    ],
)
async def test_who_says_something_else_or_nothing_is_named(tmp_path, modules, name, words):
    module = await ChildProcess.start(name, [], tmp_path / "log", "the router", environment=modules)

    with pytest.raises(StartError, match=words):
        await module.read_ready_line(RouterPorts, 60)
    await module.stop(60)


async def test_it_imports_nothing_from_the_working_directory(tmp_path, modules, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('not yours')")
    monkeypatch.chdir(tmp_path)
    module = await ChildProcess.start("announcing", [], tmp_path / "log", "the router", environment=modules)

    assert await module.read_ready_line(RouterPorts, 60) == RouterPorts(7, 8)
    await module.stop(60)


def test_it_ends_with_who_started_it_however_that_ends(tmp_path, modules):
    command = [sys.executable, "-c", PARENT, modules["PYTHONPATH"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)

    assert psutil.wait_procs([child], 60) == ([child], [])
