"""Exit codes gate what follows; what was started ends with the command."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil

from benchmarks.first_week.checking import Check, Seen, require
from benchmarks.first_week.stranger import PATIENCE_SECONDS, a_pipeline, trimtab, until


def load_without_a_server(folder: Path) -> Seen:
    """Every request fails, and so does the command."""
    path = a_pipeline(folder)
    done = trimtab("loadtest", str(path), "--address", "127.0.0.1:9", "--load", "constant:20", "--duration", "1")
    require(done.code == 1, f"exit code {done.code}, not 1")
    return Seen("exit code 1")


def plan_beyond_the_budget(folder: Path) -> Seen:
    """A plan that cannot carry the load has exit code 1, one that can 0."""
    path = a_pipeline(folder)
    require(trimtab("profile", str(path), "--quick").code == 0, "the profile failed")
    codes = [trimtab("plan", str(path), "--load", load).code for load in ("5", "1000000")]
    require(codes == [0, 1], f"exit codes {codes}, not 0 and 1")
    return Seen("exit codes 0 and 1")


def status_of_nothing(_: Path) -> Seen:
    """Nobody there is a failure with one line."""
    done = trimtab("status", "--port", "9")
    require(done.code == 1 and "Traceback" not in done.errors, f"exit code {done.code}: {done.errors}")
    return Seen(done.errors.strip())


def profile_ends(folder: Path) -> Seen:
    """SIGTERM of `trimtab profile` leaves no process behind."""
    path = a_pipeline(folder)
    command = [sys.executable, "-m", "trimtab", "profile", str(path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        whole = psutil.Process(process.pid)
        until(lambda: whole.children(recursive=True), "a model server is started")
        below = whole.children(recursive=True)
        process.send_signal(signal.SIGTERM)
        code = process.wait(PATIENCE_SECONDS)
    _, alive = psutil.wait_procs(below, timeout=60)
    for process_left in alive:
        process_left.kill()
    require(not alive, f"{len(alive)} processes are left")
    require(code == 143, f"exit code {code}, not 143")
    return Seen("exit code 143, nothing left")


CHECKS = (
    Check("command line", "a load nobody answers fails", load_without_a_server),
    Check("command line", "a plan that cannot carry its load fails", plan_beyond_the_budget),
    Check("command line", "status of nothing fails", status_of_nothing),
    Check("command line", "SIGTERM of profile leaves nothing", profile_ends),
)
