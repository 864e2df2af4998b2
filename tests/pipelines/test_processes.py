"""Processes and their files: ready lines, isolation, stopping, retained memory, and bounded JSONL files."""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from trimtab_pipelines.jsonl import JsonLinesFile, drop_older_half, read_lines, thin_older_half
from trimtab_pipelines.processes.child_process import ChildProcess, RouterPorts, StartError
from trimtab_pipelines.processes.malloc_tuning import retain_freed_memory

ANNOUNCING = """
import sys, time
from trimtab_pipelines.processes.child_process import RouterPorts, print_ready_line
print_ready_line(RouterPorts(7, 8))
sys.stderr.write("listening")
time.sleep(600)
"""
PARENT = """
import asyncio, sys, time
from pathlib import Path
from trimtab_pipelines.processes.child_process import ChildProcess
process = asyncio.run(ChildProcess.start("announcing", [], Path("log"), "it", environment={"PYTHONPATH": sys.argv[1]}))
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def modules(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "announcing.py").write_text(ANNOUNCING)
    (folder / "babbling.py").write_text("print('hello')")
    (folder / "broken.py").write_text("raise SystemExit('no such thing')")
    return {"PYTHONPATH": str(folder)}


async def test_ready_line_is_read_and_process_stops(tmp_path, modules):
    module = await ChildProcess.start("announcing", [], tmp_path / "logs" / "log", "the router", environment=modules)

    assert await module.read_ready_line(RouterPorts, 60) == RouterPorts(7, 8)
    assert module.running
    await module.stop(60)
    assert not module.running


@pytest.mark.parametrize(
    ("name", "message"), [("babbling", "printed b'hello"), ("broken", "exit code 1(?s:.)*no such thing")]
)
async def test_missing_ready_line_is_reported(tmp_path, modules, name, message):
    module = await ChildProcess.start(name, [], tmp_path / "log", "the router", environment=modules)

    with pytest.raises(StartError, match=message):
        await module.read_ready_line(RouterPorts, 60)
    await module.stop(60)


async def test_child_imports_nothing_from_working_directory(tmp_path, modules, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('not yours')")
    monkeypatch.chdir(tmp_path)
    module = await ChildProcess.start("announcing", [], tmp_path / "log", "the router", environment=modules)

    assert await module.read_ready_line(RouterPorts, 60) == RouterPorts(7, 8)
    await module.stop(60)


def test_child_ends_with_killed_parent(tmp_path, modules):
    command = [sys.executable, "-c", PARENT, modules["PYTHONPATH"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)

    assert psutil.wait_procs([child], 60) == ([child], [])


FAULTS = """
import resource
from trimtab_pipelines.processes.malloc_tuning import retain_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        [b"x" * size for size in (900_000, 500_000, 300_000)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults()
retain_freed_memory(2**20, 2**23)
print(given_back, faults())
"""


@pytest.mark.skipif(not retain_freed_memory(2**20, 2**23), reason="the C library is another than GNU's")
def test_freed_memory_is_reused():
    process = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=60)
    given_back, kept = map(int, process.stdout.split())

    assert given_back > 5_000, "each request had pages of its own"
    assert kept < given_back / 4


@contextmanager
def a_disk_with(most_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond so many bytes: the disk takes a part of a write, then none."""
    before, heard = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, heard)


def test_full_disk_loses_only_the_current_line(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = JsonLinesFile(path, 10**6)
    lines.append(json.dumps("one"))
    with a_disk_with(10):
        for _ in range(3):
            with pytest.raises(OSError, match=r"no room|File too large"):
                lines.append(json.dumps("refused"))
    lines.append(json.dumps("two"))
    assert path.read_text() == '"one"\n"two"\n'


def test_torn_and_invalid_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text('"one"\n"to')
    JsonLinesFile(path, 10**6).append(json.dumps("two"))
    assert read_lines(path, json.loads) == ["one", "two"]
    path.write_text('"one"\n"to"two"\n\n"three"\n"fo')
    assert read_lines(path, json.loads) == ["one", "three"]
    assert read_lines(tmp_path / "nothing", json.loads) == []


@pytest.mark.parametrize("shorten", [drop_older_half, thin_older_half])
def test_file_stays_within_its_bound(tmp_path: Path, shorten) -> None:
    path = tmp_path / "lines"
    lines = JsonLinesFile(path, 100, shorten)
    for number in range(1000):
        lines.append(str(number))
        assert path.stat().st_size <= 100
    found = read_lines(path, int)
    assert found[-1] == 999
    assert found == sorted(found)
    assert (found[0] == 0) is (shorten is thin_older_half)
