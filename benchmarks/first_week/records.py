"""A folder belongs to one run, and its record outlives a full disk and a killed supervisor."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.clients.tools import AbsentError
from benchmarks.first_week.checking import Check, Seen, require
from benchmarks.first_week.faults import asking
from benchmarks.first_week.stranger import a_pipeline, trimtab, until, up

DISK_MEBIBYTES = 64
FULL_SECONDS = 15.0
LOAD = ("--load", "constant:10")


def two_runs_on_one_folder(folder: Path) -> Seen:
    """The second is refused, told whose the folder is; the first goes on."""
    with up(folder) as served:
        listed = (served.folder / "endpoints.json").read_text()
        arguments = ("--folder", str(served.folder), "--rest-port", "0", "--grpc-port", "0", "--admin-port", "0")
        done = trimtab("up", str(a_pipeline(folder)), *arguments)
        require(done.code == 2, f"exit code {done.code}, not 2: {done.errors}")
        require(f"process {served.process.pid}" in done.errors, done.errors)
        require((served.folder / "endpoints.json").read_text() == listed, "the first one's replicas were rewritten")
        require(served.ask()[0] == 200, "the first one serves no more")
    return Seen(done.errors.strip())


def killed_supervisor(folder: Path) -> Seen:
    """After kill -9 the report tells of the run up to the last second, and no process is left."""
    with up(folder) as served:
        below = psutil.Process(served.process.pid).children(recursive=True)
        with asking(served):
            until(lambda: _samples(served.folder) >= 5, "five seconds are recorded")
        served.process.kill()
        killed_at = time.time()
        _, alive = psutil.wait_procs(below, timeout=60)
        require(not alive, f"left: {', '.join(' '.join(process.cmdline())[:100] for process in alive)}")
    last = json.loads((served.folder / "samples.jsonl").read_text().splitlines()[-1])["at"]
    done = trimtab("report", str(served.folder), "-o", str(folder / "page.html"))
    require(done.code == 0 and (folder / "page.html").exists(), done.errors)
    require(killed_at - last < 2.5, f"the last {killed_at - last:.1f} s are missing")
    return Seen("reported", {"killed_supervisor_seconds_missing": round(killed_at - last, 2)})


def full_disk(folder: Path) -> Seen:
    """The disk is full for fifteen seconds: serving goes on, the record resumes, summary and report are there."""
    with a_small_disk(folder / "disk") as disk:
        record, page = disk / "run", folder / "page.html"
        options = (*LOAD, "--duration", "45", "--report", str(page))
        with up(folder, *options, run_folder=record) as served:
            until(lambda: _samples(record) >= 5, "five seconds are recorded")
            with _filled(disk):
                before = _samples(record)
                time.sleep(FULL_SECONDS)
                require(_samples(record) <= before + 3, "the disk is not full")  # what the last page had room for
            until(lambda: _samples(record) >= before + FULL_SECONDS - 3, "what waited is written")
            output, errors = served.process.communicate(timeout=120)
        require(served.process.returncode == 0, f"exit code {served.process.returncode}: {errors}")
        summary = json.loads((record / "load" / "load.json").read_text())["summary"]
        require("the disk takes no record" in output, "the console says nothing of it")
    require(summary["failed"] == 0, f"{summary['failed']} requests failed")
    require(page.exists() and "requests received" in output, "summary or report is missing")
    ends = sum(summary[name] for name in ("ok", "late", "dropped", "refused", "failed"))
    require(ends == summary["received"], f"{summary['received']} received, {ends} ended")
    return Seen("served and recorded", {"full_disk_answered_ok": summary["ok"] / summary["received"]})


@contextmanager
def a_small_disk(folder: Path) -> Iterator[Path]:
    """Mount a small file system of its own; raises AbsentError where this user may not."""
    folder.mkdir(parents=True)
    options = ["-t", "tmpfs", "-o", f"size={DISK_MEBIBYTES}m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        raise AbsentError("a full disk needs one that may be mounted: run it as root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


@contextmanager
def _filled(disk: Path) -> Iterator[None]:
    """Leave no room on a disk while the block runs."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(2**16)):
                pass
        except OSError:
            pass
    try:
        yield
    finally:
        filler.unlink()


def _samples(record: Path) -> int:
    samples = record / "samples.jsonl"
    return samples.read_bytes().count(b"\n") if samples.exists() else 0


CHECKS = (
    Check("folders", "a folder belongs to one run", two_runs_on_one_folder),
    Check("records", "a killed supervisor leaves its record", killed_supervisor),
    Check("records", "a full disk costs nothing", full_disk),
)
