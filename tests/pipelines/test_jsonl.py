"""JSONL files: bounded size, and torn lines that lose only themselves."""

import json
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trimtab_pipelines.jsonl import JsonLinesFile, drop_older_half, read_lines, thin_older_half


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
