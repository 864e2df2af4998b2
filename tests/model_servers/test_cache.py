"""Weights cache: partial files and the bound."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from trimtab_model_servers.weights import cache

HOUR_SECONDS = 3600.0
WRITES_FOR_EVER = """
import sys
from pathlib import Path
from trimtab_model_servers.weights import cache

def write(file):
    file.write(bytes(1000))
    file.flush()
    print("written", flush=True)
    sys.stdin.read()

cache.cached_file("x.safetensors", lambda _: True, write, 60.0, Path(sys.argv[1]))
"""


def a_file(path, used_at, size=1000):
    path.write_bytes(bytes(size))
    os.utime(path, (used_at, used_at))
    return path


def write_whole(file):
    file.write(b"whole")


def an_hour_ago():
    return time.time() - HOUR_SECONDS


@pytest.fixture
def writer(tmp_path):
    """A process that has begun to write x.safetensors."""
    command = [sys.executable, "-c", WRITES_FOR_EVER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        yield process
        process.kill()


def test_partial_file_of_dead_process_is_replaced(writer, tmp_path):
    writer.kill()
    writer.wait()
    assert (tmp_path / ".fetching-x.safetensors").stat().st_size == 1000
    path = cache.cached_file("x.safetensors", lambda _: True, write_whole, 60.0, tmp_path)

    assert path.read_bytes() == b"whole"
    assert {one.name for one in tmp_path.iterdir()} == {"x.safetensors", ".x.safetensors.lock"}


def test_abandoned_partial_file_is_removed(tmp_path):
    unfinished = a_file(tmp_path / ".fetching-x", an_hour_ago())
    just_begun = a_file(tmp_path / ".fetching-y", time.time())
    cache.evict(tmp_path, 10)

    assert not unfinished.exists()
    assert just_begun.exists()


def test_file_in_progress_counts_and_stays(writer, tmp_path):
    fetching = tmp_path / ".fetching-x.safetensors"
    os.utime(fetching, (an_hour_ago(), an_hour_ago()))
    unused = a_file(tmp_path / "unused.safetensors", an_hour_ago())
    cache.evict(tmp_path, 2000)
    assert unused.exists()
    cache.evict(tmp_path, 1999)

    assert not unused.exists()
    assert fetching.exists()


def test_new_file_evicts_unused_but_no_recent_ones(monkeypatch, tmp_path):
    monkeypatch.setenv("TRIMTAB_WEIGHTS_CACHE_BYTES", "1004")
    a_file(tmp_path / "old", an_hour_ago())
    a_file(tmp_path / "recent", time.time())
    cache.cached_file("x", lambda _: True, write_whole, 60.0, tmp_path)

    assert {path.name for path in tmp_path.glob("[!.]*")} == {"recent", "x"}


def test_unrelated_folder_is_not_evicted(tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "other").mkdir()
    a_file(tmp_path / "a.safetensors", 5)
    for name in ("hf", "other"):
        os.utime(tmp_path / name, (1, 1))
    cache.evict(tmp_path, 10)

    assert {one.name for one in tmp_path.iterdir()} == {"hf", "other"}


def test_repository_is_evicted_as_one_entry(monkeypatch, tmp_path):
    monkeypatch.setenv("TRIMTAB_WEIGHTS_CACHE", str(tmp_path))
    blobs, snapshots = (tmp_path / "hf" / "owner--name" / one for one in ("blobs", "snapshots"))
    for folder in (blobs, snapshots):
        folder.mkdir(parents=True)
    a_file(blobs / "content", an_hour_ago())
    (snapshots / "model.safetensors").symlink_to(blobs / "content")
    os.utime(blobs.parent, (1, 1))
    cache.evict(tmp_path, 1000)
    assert blobs.exists()

    assert cache.hub_folder("owner/name") == blobs.parent  # in use again
    cache.evict(tmp_path, 999)
    assert blobs.exists()

    os.utime(blobs.parent, (1, 1))
    cache.evict(tmp_path, 999)
    assert not list((tmp_path / "hf").iterdir())


def test_unremovable_entry_does_not_stop_eviction(tmp_path):
    (tmp_path / "hf").mkdir()
    target = tmp_path / ".elsewhere"
    target.mkdir()
    a_file(target / "content", 1)
    (tmp_path / "hf" / "owner--name").symlink_to(target)  # of which rmtree takes none
    os.utime(target, (1, 1))
    a_file(tmp_path / "a.safetensors", 5)
    cache.evict(tmp_path, 10)

    assert (target / "content").exists()
    assert not (tmp_path / "a.safetensors").exists()


def test_eviction_tolerates_concurrent_removal(monkeypatch, tmp_path):
    repository, status, paths = tmp_path / "hf" / "old--one", cache.file_status, []
    for number in range(4):
        (repository / f"blobs-{number}").mkdir(parents=True)
        (repository / f"blobs-{number}" / "file").write_bytes(b"x" * 100)

    def removed_meanwhile(path):
        paths.append(path)
        if len(paths) == 4:
            shutil.rmtree(repository)
        return status(path)

    monkeypatch.setattr(cache, "file_status", removed_meanwhile)
    cache.evict(tmp_path, 10)

    assert len(paths) >= 4
    assert not repository.exists()
