"""Memory of a pipeline on this machine, and seconds until a killed replica is replaced."""

import json
import re
import signal
import time
import urllib.request
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.builders import a_plan
from tests.figures import Figures
from tests.local_run import Up, command_line, until, up
from trimtab.local.replica_manager import HEALTHY_SECONDS
from trimtab_pipelines.documents import load_pipeline, write_json

pytestmark = [pytest.mark.endurance, pytest.mark.timeout(900)]

DIGITS = Path(__file__).parents[2] / "pipelines" / "digits"
MAX_ECHO_MIB, MAX_DIGITS_MIB = 350, 1000
MAX_START_SECONDS, MAX_WHOLE_SECONDS = 2.0, 2.5
STARTS = 20
ROLES = ("trimtab_router.envoy", "trimtab_router", "trimtab_adapter", "/envoy", "fork_server", " up ")
_PSS = re.compile(r"^Pss:\s+(\d+) kB$", re.MULTILINE)
_READY = re.compile(r"(\w+)-\d+ is ready after (\S+) s")


def pss_mib(served: Up) -> dict[str, float]:
    """Proportional set size of the processes of a run by a word of their command lines, and of all."""
    sizes: dict[str, float] = defaultdict(float)
    whole = psutil.Process(served.process.pid)
    for process in (whole, *whole.children(recursive=True)):
        words = command_line(process)
        match = _PSS.search(Path(f"/proc/{process.pid}/smaps_rollup").read_text())
        size = int(match[1]) / 1024 if match else 0.0
        role = next((role for role in ROLES if role in words), "other")
        sizes[re.sub(r"\W+", "_", role).strip("_")] += size
        sizes["all"] += size
    return {f"{role}_pss_mib": round(size, 1) for role, size in sizes.items()}


def test_memory_of_a_two_stage_echo(tmp_path: Path, figures: Figures) -> None:
    with up(tmp_path) as served:
        assert served.ask()[0] == 200
        sizes = pss_mib(served)

    figures.add(**sizes)
    figures.require("PSS of all processes, MiB", sizes["all_pss_mib"], "<=", MAX_ECHO_MIB)


def ready_replicas(served: Up, stage: str) -> set[str]:
    """Names of the replicas of a stage that the router uses."""
    with urllib.request.urlopen(f"http://127.0.0.1:{served.admin_port}/trimtab/v1/state", timeout=5) as response:
        endpoints = json.load(response)["stages"][stage]["endpoints"]
    return {name for name, endpoint in endpoints.items() if endpoint["ready"]}


def seconds_until_whole(served: Up) -> float:
    """Kill the newest replica of stage `read` once it counts as healthy; return the time until another serves."""
    before = ready_replicas(served, "read")
    assert len(before) == 2
    victim = served.replica(max(before, key=lambda name: int(name.rpartition("-")[2])))
    time.sleep(max(victim.create_time() + 3 * HEALTHY_SECONDS - time.time(), 0))
    victim.send_signal(signal.SIGKILL)
    return until(lambda: len(now := ready_replicas(served, "read")) == 2 and now != before, "another replica serves")


def test_memory_and_starts_of_digits(tmp_path: Path, figures: Figures) -> None:
    plan = tmp_path / "plan.json"
    write_json(plan, a_plan(load_pipeline(DIGITS), replicas=2, cores="350m"))
    with up(tmp_path, "--plan", str(plan), run_folder=tmp_path / "run", pipeline=DIGITS) as served:
        until(lambda: len(ready_replicas(served, "read")) == 2, "the router uses both replicas")
        sizes = pss_mib(served)
        whole = [seconds_until_whole(served) for _ in range(STARTS)]
        starts = [float(seconds) for _, seconds in _READY.findall(served.log())]
        after = pss_mib(served)

    first, later = starts[:4], starts[4:]
    p90_start, p90_whole = float(np.quantile(later, 0.9)), float(np.quantile(whole, 0.9))
    figures.add(**sizes, pss_mib_after_restarts=after["all_pss_mib"], first_start_seconds=max(first))
    figures.add(start_seconds_p50=float(np.median(later)), start_seconds_p90=p90_start)
    figures.add(whole_seconds_p50=float(np.median(whole)), whole_seconds_p90=p90_whole)
    figures.require("PSS of all processes, MiB", max(sizes["all_pss_mib"], after["all_pss_mib"]), "<=", MAX_DIGITS_MIB)
    figures.require("start of a replica, p90 of 20, seconds", p90_start, "<=", MAX_START_SECONDS, depends_on_load=True)
    figures.require("kill -9 to whole, p90 of 20, seconds", p90_whole, "<=", MAX_WHOLE_SECONDS, depends_on_load=True)
