"""Logs of a run: bounded in size, trimmed while a process writes them."""

import os
from pathlib import Path

from trimtab.local.logs import trim_logs


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
